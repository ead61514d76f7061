# llama3.1-8b TP2 on 2 chips of h100-sxm: trtllm 1.3, flags as in its documentation of main
# (0434755).
# * The memory fraction is KV's share of what is free once all else is loaded; with it 0.9 of the
#   chip is in use, as planned.

# server on node0, chips 0-1
cat > replica0.yaml <<'END_OF_FILE'
dtype: bfloat16
enable_chunked_prefill: true
kv_cache_config:
  dtype: auto
  free_gpu_memory_fraction: 0.9116
  tokens_per_block: 32
END_OF_FILE
CUDA_VISIBLE_DEVICES=0,1 trtllm-serve meta-llama/Llama-3.1-8B --tp_size 2 --max_seq_len 131072 \
  --max_batch_size 2048 --max_num_tokens 8192 --host 0.0.0.0 --port 8000 \
  --extra_llm_api_options replica0.yaml
