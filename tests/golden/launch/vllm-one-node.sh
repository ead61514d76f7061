# llama3-70b TP8 on 8 chips of h100-sxm: vllm 0.19, flags as in its documentation of main (096bd6a).

# server on node0, chips 0-7
CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 vllm serve meta-llama/Meta-Llama-3-70B \
  --tensor-parallel-size 8 --dtype bfloat16 --kv-cache-dtype auto --max-model-len 1280 \
  --gpu-memory-utilization 0.9 --max-num-seqs 1024 --max-num-batched-tokens 8192 --block-size 16 \
  --host 0.0.0.0 --port 8000
