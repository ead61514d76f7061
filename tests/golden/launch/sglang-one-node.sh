# llama3-70b TP8 on 8 chips of h100-sxm: sglang 0.5.1, flags as in its documentation of main
# (004813e).

# server on node0, chips 0-7
CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 python -m sglang.launch_server \
  --model-path meta-llama/Meta-Llama-3-70B --tp-size 8 --dtype bfloat16 --kv-cache-dtype auto \
  --context-length 1280 --mem-fraction-static 0.88 --max-running-requests 2048 \
  --chunked-prefill-size 8192 --page-size 1 --host 0.0.0.0 --port 30000
