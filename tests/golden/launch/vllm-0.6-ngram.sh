# llama3-8b TP1 on 1 chip of h100-sxm: vllm-0.6 0.6, flags as in its documentation of 0.6.3.

# server on node0, chip 0
CUDA_VISIBLE_DEVICES=0 vllm serve meta-llama/Meta-Llama-3-8B --dtype bfloat16 \
  --kv-cache-dtype auto --max-model-len 1280 --gpu-memory-utilization 0.9 --max-num-seqs 1024 \
  --max-num-batched-tokens 8192 --block-size 16 --host 0.0.0.0 --port 8000 \
  --enable-chunked-prefill --speculative-model '[ngram]' --num-speculative-tokens 4 \
  --ngram-prompt-lookup-max 4
