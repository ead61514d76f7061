# llama3-70b TP8xPP2 on 16 chips of h100-sxm: sglang 0.5.1, flags as in its documentation of main
# (004813e).
# * A replica spans nodes: one process a node, the first serves.
# * node0 and node1 stand for the addresses of the nodes (--hosts).
# * A server runs until it is stopped: give each command a shell of its own, on the node named above
#   it.

# server on node0, chips 0-7
CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 python -m sglang.launch_server \
  --model-path meta-llama/Meta-Llama-3-70B --tp-size 8 --pp-size 2 --dtype bfloat16 \
  --kv-cache-dtype auto --context-length 1280 --mem-fraction-static 0.88 \
  --max-running-requests 2048 --chunked-prefill-size 8192 --page-size 1 --host 0.0.0.0 \
  --port 30000 --dist-init-addr node0:29500 --nnodes 2 --node-rank 0

# server on node1, chips 0-7
CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 python -m sglang.launch_server \
  --model-path meta-llama/Meta-Llama-3-70B --tp-size 8 --pp-size 2 --dtype bfloat16 \
  --kv-cache-dtype auto --context-length 1280 --mem-fraction-static 0.88 \
  --max-running-requests 2048 --chunked-prefill-size 8192 --page-size 1 --host 0.0.0.0 \
  --port 30000 --dist-init-addr node0:29500 --nnodes 2 --node-rank 1
