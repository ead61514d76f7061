# llama3.1-8b TP2 on 2 chips of h100-sxm: vllm 0.19, flags as in its documentation of main
# (096bd6a).

# server on node0, chips 0-1
CUDA_VISIBLE_DEVICES=0,1 vllm serve meta-llama/Llama-3.1-8B --tensor-parallel-size 2 \
  --dtype bfloat16 --kv-cache-dtype auto --max-model-len 131072 --gpu-memory-utilization 0.9 \
  --max-num-seqs 1024 --max-num-batched-tokens 8192 --block-size 16 --host 0.0.0.0 --port 8000
