#include "common/model/passes/ragged_batch.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "common/tensor/aten/device_copies.h"

namespace tandem {

RaggedBatch MakeRaggedBatch(const std::vector<std::vector<int64_t>>& sequences, at::Device device) {
  RaggedBatch batch;
  batch.offsets = {0};
  for (const auto& sequence : sequences) {
    const auto length = static_cast<int64_t>(sequence.size());
    batch.offsets.push_back(batch.offsets.back() + length);
    batch.positions_end = std::max(batch.positions_end, length);
  }
  const int64_t count = batch.num_tokens(), limits = std::ssize(batch.offsets);
  std::vector<int64_t> numbers(static_cast<size_t>(2 * count + limits));
  int64_t *token = numbers.data(), *position = token + count;
  for (const auto& sequence : sequences) {
    token = std::copy(sequence.begin(), sequence.end(), token);
    for (size_t i = 0; i < sequence.size(); ++i) *position++ = static_cast<int64_t>(i);
  }
  std::copy(batch.offsets.begin(), batch.offsets.end(), position);
  const at::Tensor copied = CopyToDevice(numbers, device);
  batch.tokens = copied.narrow(0, 0, count);
  batch.positions = copied.narrow(0, count, count);
  if (!device.is_cpu()) batch.device_offsets = copied.narrow(0, 2 * count, limits).to(at::kInt);
  return batch;
}

}  // namespace tandem
