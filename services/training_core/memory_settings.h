// What errors about memory advise. No torch.
#ifndef TANDEM_SERVICES_TRAINING_CORE_MEMORY_SETTINGS_H_
#define TANDEM_SERVICES_TRAINING_CORE_MEMORY_SETTINGS_H_

namespace tandem::training {

// The settings by which a server takes less memory to train.
inline constexpr char kMemorySettings[] =
    "a smaller batch.micro_batch_tokens or batch.logits_chunk_bytes, "
    "strategy.recompute_granularity full, checkpoint_snapshot false, more ranks with strategy.name "
    "zero or megatron";

}  // namespace tandem::training

#endif  // TANDEM_SERVICES_TRAINING_CORE_MEMORY_SETTINGS_H_
