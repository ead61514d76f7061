# llama3-70b TP8 on 8 chips of gb200-nvl72: vllm 0.19, flags as in its documentation of main
# (096bd6a).
# * A replica spans nodes: one process a node, the first serves (multiprocessing, no Ray).
# * A server runs until it is stopped: give each command a shell of its own, on the node named above
#   it.

# server on 10.0.0.1, chips 0-3
CUDA_VISIBLE_DEVICES=0,1,2,3 vllm serve meta-llama/Meta-Llama-3-70B --tensor-parallel-size 8 \
  --dtype bfloat16 --kv-cache-dtype auto --max-model-len 1280 --gpu-memory-utilization 0.9 \
  --max-num-seqs 1024 --max-num-batched-tokens 8192 --block-size 16 --host 0.0.0.0 --port 8000 \
  --nnodes 2 --node-rank 0 --master-addr 10.0.0.1 --master-port 29500

# server on 10.0.0.2, chips 0-3
CUDA_VISIBLE_DEVICES=0,1,2,3 vllm serve meta-llama/Meta-Llama-3-70B --tensor-parallel-size 8 \
  --dtype bfloat16 --kv-cache-dtype auto --max-model-len 1280 --gpu-memory-utilization 0.9 \
  --max-num-seqs 1024 --max-num-batched-tokens 8192 --block-size 16 --host 0.0.0.0 --port 8000 \
  --nnodes 2 --node-rank 1 --master-addr 10.0.0.1 --master-port 29500 --headless
