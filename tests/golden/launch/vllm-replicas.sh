# llama3-70b TP4xDP3 on 12 chips of h100-sxm: vllm 0.19, flags as in its documentation of main
# (096bd6a).
# * Each replica is a server of its own on its own chips and port, with a load balancer of yours in
#   front (vLLM's documentation: external load balancing, no data-parallel option); its own
#   --data-parallel-size would choose the chips itself.
# * node0 and node1 stand for the addresses of the nodes (--hosts).
# * A server runs until it is stopped: give each command a shell of its own, on the node named above
#   it.
# * 4 of 16 chips stay idle.

# replica 0, server on node0, chips 0-3
CUDA_VISIBLE_DEVICES=0,1,2,3 vllm serve meta-llama/Meta-Llama-3-70B --tensor-parallel-size 4 \
  --dtype bfloat16 --kv-cache-dtype auto --max-model-len 1280 --gpu-memory-utilization 0.9 \
  --max-num-seqs 1024 --max-num-batched-tokens 8192 --block-size 16 --host 0.0.0.0 --port 8000

# replica 1, server on node0, chips 4-7
CUDA_VISIBLE_DEVICES=4,5,6,7 vllm serve meta-llama/Meta-Llama-3-70B --tensor-parallel-size 4 \
  --dtype bfloat16 --kv-cache-dtype auto --max-model-len 1280 --gpu-memory-utilization 0.9 \
  --max-num-seqs 1024 --max-num-batched-tokens 8192 --block-size 16 --host 0.0.0.0 --port 8001

# replica 2, server on node1, chips 0-3
CUDA_VISIBLE_DEVICES=0,1,2,3 vllm serve meta-llama/Meta-Llama-3-70B --tensor-parallel-size 4 \
  --dtype bfloat16 --kv-cache-dtype auto --max-model-len 1280 --gpu-memory-utilization 0.9 \
  --max-num-seqs 1024 --max-num-batched-tokens 8192 --block-size 16 --host 0.0.0.0 --port 8002
