# llama3-8b TP8 on 8 chips of tpu-v5e: jetstream 2024-04, flags as in its documentation of 0.2.4.
# * JetStream's PyTorch engine is no longer developed; `jpt list` prints the models that it has.

# server on node0, chips 0-7
jpt serve --model_id meta-llama/Meta-Llama-3-8B --override_datatype=bfloat16 --quantize_kv_cache=0 \
  --max_input_length=1024 --max_output_length=256 --override_batch_size=64 --port=8888
