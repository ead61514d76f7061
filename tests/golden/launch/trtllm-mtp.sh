# deepseek-v3 TP8 on 8 chips of b200-sxm: trtllm 1.3, flags as in its documentation of main
# (0434755).
# * The memory fraction is KV's share of what is free once all else is loaded; with it 0.9 of the
#   chip is in use, as planned.

# server on node0, chips 0-7
cat > replica0.yaml <<'END_OF_FILE'
dtype: auto
enable_chunked_prefill: true
kv_cache_config:
  dtype: fp8
  free_gpu_memory_fraction: 0.8284
  tokens_per_block: 32
speculative_config:
  decoding_type: MTP
  max_draft_len: 1
  num_nextn_predict_layers: 1
END_OF_FILE
CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 trtllm-serve deepseek-ai/DeepSeek-V3 --tp_size 8 \
  --max_seq_len 1280 --max_batch_size 2048 --max_num_tokens 8192 --host 0.0.0.0 --port 8000 \
  --extra_llm_api_options replica0.yaml
