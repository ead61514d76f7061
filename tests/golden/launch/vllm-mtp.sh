# glm-4.5-air TP4 on 4 chips of h100-sxm: vllm 0.19, flags as in its documentation of main
# (096bd6a).

# server on node0, chips 0-3
CUDA_VISIBLE_DEVICES=0,1,2,3 vllm serve zai-org/GLM-4.5-Air --tensor-parallel-size 4 \
  --dtype bfloat16 --kv-cache-dtype auto --max-model-len 1280 --gpu-memory-utilization 0.9 \
  --max-num-seqs 1024 --max-num-batched-tokens 8192 --block-size 16 --host 0.0.0.0 --port 8000 \
  --speculative-config '{"method": "mtp", "num_speculative_tokens": 1}'
