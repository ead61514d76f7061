# llama3-70b TP8xPP2 on 16 chips of h100-sxm: vllm-0.11 0.11, flags as in its documentation of main
# (096bd6a).
# * A replica spans nodes: a Ray cluster of the replica's nodes, then one server on the first.
# * node0 and node1 stand for the addresses of the nodes (--hosts).
# * A server runs until it is stopped: give each command a shell of its own, on the node named above
#   it.

# cluster on node0, chips 0-7
CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 ray start --head --port=29500

# cluster on node1, chips 0-7
CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 ray start --address=node0:29500

# server on node0, chips 0-7
CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 vllm serve meta-llama/Meta-Llama-3-70B \
  --tensor-parallel-size 8 --pipeline-parallel-size 2 --dtype bfloat16 --kv-cache-dtype auto \
  --max-model-len 1280 --gpu-memory-utilization 0.9 --max-num-seqs 1024 \
  --max-num-batched-tokens 8192 --block-size 16 --host 0.0.0.0 --port 8000 \
  --distributed-executor-backend ray
