// Tables of the sequences of a batch, beside their offsets, for attention within each of them.
#ifndef TANDEM_COMMON_OPS_ATTENTION_SEQUENCE_TABLES_H_
#define TANDEM_COMMON_OPS_ATTENTION_SEQUENCE_TABLES_H_

#include <ATen/core/Tensor.h>

#include <memory>

#include "common/ops/attention/paged_sequences.h"
#include "common/ops/attention/shared_prefixes.h"

namespace tandem::ops {

// Made once for all layers of a pass; all of it may be absent.
struct SequenceTables {
  // The offsets as int32, on a device that is not the CPU; undefined: made where they are needed.
  at::Tensor device_offsets = {};
  // nullptr: no sequence shares a prefix.
  std::shared_ptr<const SharedPrefixes> prefixes = nullptr;
  // PlanOwnBlocks, for attention by rows on a GPU; nullptr: made where it is needed.
  std::shared_ptr<const PagedSequences> own_blocks = nullptr;
};

}  // namespace tandem::ops

#endif  // TANDEM_COMMON_OPS_ATTENTION_SEQUENCE_TABLES_H_
