#include "services/rollout/engine/torch_runner.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "common/base/status_macros.h"
#include "common/tensor/catch_torch_errors.h"
#include "services/rollout/engine/rollout_memory.h"

namespace tandem::rollout {
namespace {

struct OutputRow {
  int64_t input;
  int64_t row;
};

}  // namespace

TorchRunner::TorchRunner(std::unique_ptr<Model> model, int64_t num_slots, int64_t max_model_len)
    : model_(std::move(model)),
      cache_(model_->CacheLayout(), num_slots, max_model_len, model_->device(), model_->dtype()) {}

absl::Status TorchRunner::Truncate(int64_t slot, int64_t length) {
  return CatchTorchErrors("KV cache", [&] {
    cache_.Truncate(slot, length);
    return absl::OkStatus();
  });
}

absl::Status TorchRunner::CopyPrefix(int64_t from, int64_t to, int64_t length) {
  return CatchTorchErrors("KV cache", [&] {
    cache_.CopyPrefix(from, to, length);
    return absl::OkStatus();
  });
}

absl::Status TorchRunner::Forward(std::span<const RunnerInput> inputs, const RowSink& sink) {
  std::vector<std::vector<int64_t>> tokens;
  std::vector<DecodeInput> decode;
  std::vector<OutputRow> rows;
  tokens.reserve(inputs.size());
  decode.reserve(inputs.size());
  for (size_t i = 0; i < inputs.size(); ++i) {
    const RunnerInput& input = inputs[i];
    tokens.emplace_back(input.tokens.begin(), input.tokens.end());
    decode.push_back(
        {.slot = input.slot, .tokens = tokens.back(), .num_output_rows = input.num_output_rows});
    for (int64_t row = 0; row < input.num_output_rows; ++row) {
      rows.push_back({static_cast<int64_t>(i), row});
    }
  }
  return CatchTorchErrors("forward pass", [&]() -> absl::Status {
    const c10::InferenceMode inference_mode;
    TANDEM_ASSIGN_OR_RETURN(const at::Tensor hidden, model_->Decode(cache_, decode));
    const int64_t total = static_cast<int64_t>(rows.size());
    const int64_t width = model_->num_token_ids();
    const int64_t chunk =
        std::max<int64_t>(1, kLogitsBytes / (width * static_cast<int64_t>(sizeof(float))));
    for (int64_t begin = 0; begin < total; begin += chunk) {
      const int64_t count = std::min(chunk, total - begin);
      const at::Tensor rows_of_chunk = model_->ForwardLogits(hidden.narrow(0, begin, count));
      if (!sink) continue;
      // The host waits for a GPU here: once per pass, unless the pass has very many rows.
      const at::Tensor logits = rows_of_chunk.to(at::kCPU, at::kFloat).contiguous();
      const float* const data = logits.const_data_ptr<float>();
      at::parallel_for(0, count, 1, [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; ++i) {
          sink(rows[begin + i].input, rows[begin + i].row,
               {data + i * width, static_cast<size_t>(width)});
        }
      });
    }
    return absl::OkStatus();
  });
}

}  // namespace tandem::rollout
