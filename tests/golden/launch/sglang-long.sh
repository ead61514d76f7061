# llama3.1-8b TP2 on 2 chips of h100-sxm: sglang 0.5.1, flags as in its documentation of main
# (004813e).

# server on node0, chips 0-1
CUDA_VISIBLE_DEVICES=0,1 python -m sglang.launch_server --model-path meta-llama/Llama-3.1-8B \
  --tp-size 2 --dtype bfloat16 --kv-cache-dtype auto --context-length 131072 \
  --mem-fraction-static 0.88 --max-running-requests 2048 --chunked-prefill-size 8192 --page-size 1 \
  --host 0.0.0.0 --port 30000
