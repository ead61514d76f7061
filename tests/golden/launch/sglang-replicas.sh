# llama3-70b TP4xDP3 on 12 chips of h100-sxm: sglang 0.5.1, flags as in its documentation of main
# (004813e).
# * Each replica is a server of its own on its own chips and port, with SGLang's router in front, as
#   its documentation recommends over --dp-size.
# * node0 and node1 stand for the addresses of the nodes (--hosts).
# * A server runs until it is stopped: give each command a shell of its own, on the node named above
#   it.
# * 4 of 16 chips stay idle.

# replica 0, server on node0, chips 0-3
CUDA_VISIBLE_DEVICES=0,1,2,3 python -m sglang.launch_server \
  --model-path meta-llama/Meta-Llama-3-70B --tp-size 4 --dtype bfloat16 --kv-cache-dtype auto \
  --context-length 1280 --mem-fraction-static 0.88 --max-running-requests 2048 \
  --chunked-prefill-size 8192 --page-size 1 --host 0.0.0.0 --port 30001

# replica 1, server on node0, chips 4-7
CUDA_VISIBLE_DEVICES=4,5,6,7 python -m sglang.launch_server \
  --model-path meta-llama/Meta-Llama-3-70B --tp-size 4 --dtype bfloat16 --kv-cache-dtype auto \
  --context-length 1280 --mem-fraction-static 0.88 --max-running-requests 2048 \
  --chunked-prefill-size 8192 --page-size 1 --host 0.0.0.0 --port 30002

# replica 2, server on node1, chips 0-3
CUDA_VISIBLE_DEVICES=0,1,2,3 python -m sglang.launch_server \
  --model-path meta-llama/Meta-Llama-3-70B --tp-size 4 --dtype bfloat16 --kv-cache-dtype auto \
  --context-length 1280 --mem-fraction-static 0.88 --max-running-requests 2048 \
  --chunked-prefill-size 8192 --page-size 1 --host 0.0.0.0 --port 30003

# all replicas, on node0: once the servers answer
python -m sglang_router.launch_router --worker-urls http://node0:30001 http://node0:30002 \
  http://node1:30003 --port 30000
