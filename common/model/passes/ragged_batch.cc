#include "common/model/passes/ragged_batch.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "common/ops/products/fixed_rows.h"
#include "common/tensor/aten/device_copies.h"

namespace tandem {

RaggedBatch MakeRaggedBatch(const std::vector<std::vector<int64_t>>& sequences, at::Device device,
                            const std::vector<int64_t>& starts) {
  RaggedBatch batch;
  batch.offsets = {0};
  const auto start_of = [&](size_t s) { return starts.empty() ? 0 : starts[s]; };
  for (size_t s = 0; s < sequences.size(); ++s) {
    const auto length = static_cast<int64_t>(sequences[s].size());
    batch.offsets.push_back(batch.offsets.back() + length - start_of(s));
    batch.positions_end = std::max(batch.positions_end, length);
  }
  if (std::ranges::any_of(starts, [](int64_t start) { return start > 0; })) {
    batch.tables.prefixes = std::make_shared<const ops::SharedPrefixes>(batch.offsets, starts);
  }
  const int64_t count = batch.num_tokens(), limits = std::ssize(batch.offsets);
  std::vector<int64_t> numbers(static_cast<size_t>(2 * count + limits));
  int64_t *token = numbers.data(), *position = token + count;
  for (size_t s = 0; s < sequences.size(); ++s) {
    token = std::copy(sequences[s].begin() + start_of(s), sequences[s].end(), token);
    for (int64_t p = start_of(s); p < std::ssize(sequences[s]); ++p) *position++ = p;
  }
  std::copy(batch.offsets.begin(), batch.offsets.end(), position);
  const at::Tensor copied = CopyToDevice(numbers, device);
  batch.tokens = copied.narrow(0, 0, count);
  batch.positions = copied.narrow(0, count, count);
  if (!device.is_cpu())
    batch.tables.device_offsets = copied.narrow(0, 2 * count, limits).to(at::kInt);
  if (!device.is_cpu() && ops::ProductRows() > 0 && batch.tables.prefixes == nullptr) {
    batch.tables.own_blocks = ops::PlanOwnBlocks(batch.offsets, device);
  }
  return batch;
}

}  // namespace tandem
