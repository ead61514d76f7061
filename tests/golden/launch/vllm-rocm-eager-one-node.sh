# llama3.1-405b TP8 on 8 chips of mi300x: vllm-rocm-eager 0.6, flags as in its documentation of
# 0.6.3.

# server on node0, chips 0-7
HIP_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 vllm serve meta-llama/Llama-3.1-405B --tensor-parallel-size 8 \
  --dtype bfloat16 --kv-cache-dtype auto --max-model-len 1280 --gpu-memory-utilization 0.9 \
  --max-num-seqs 1024 --max-num-batched-tokens 8192 --block-size 16 --host 0.0.0.0 --port 8000 \
  --enforce-eager
