# llama3-70b TP8 on 8 chips of tpu-v5e: jetstream 2024-04, flags as in its documentation of 0.2.4.
# * JetStream's PyTorch engine is no longer developed; `jpt list` prints the models that it has.

# server on node0, chips 0-7
jpt serve --model_id meta-llama/Meta-Llama-3-70B --quantize_weights=1 \
  --quantize_type=int8_per_channel --quantize_kv_cache=1 --max_input_length=3840 \
  --max_output_length=256 --override_batch_size=1 --port=8888
