#include "services/rollout/engine/models/decode_graphs.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/base/errors/status_macros.h"
#include "common/ops/attention/device_attention.h"
#include "common/ops/threads/pass_memory.h"
#include "common/tensor/aten/aten_bytes.h"
#include "common/tensor/aten/catch_torch_errors.h"
#include "services/rollout/engine/models/device_sampler.h"
#include "services/rollout/engine/rollout_memory.h"

namespace tandem::rollout {
namespace {

DecodeShape ShapeOf(const Pass& pass) {
  int64_t rows = 0;
  for (const DecodeInput& input : pass.sequences) rows += std::ssize(input.tokens);
  return {.rows = rows, .wanted = std::ssize(pass.rows)};
}

}  // namespace

absl::Status DecodeGraphs::CheckSupported(const Model& model, DType cache_dtype) {
  if (DeviceGraph::Make(model.device()) == nullptr) {
    return absl::UnimplementedError("this device or this build has no CUDA graphs");
  }
  if (model.shard_count() > 1) {
    return absl::UnimplementedError("passes of several ranks are not captured");
  }
  if (!model.AttendsInKernel(ToScalarType(cache_dtype))) {
    return absl::UnimplementedError(
        "passes are captured where the project's kernel attends: not with latent attention, heads "
        "of more than 256 columns, or compute.kernels aten");
  }
  return absl::OkStatus();
}

DecodeGraphs::DecodeGraphs(const Model& model, KvCache& cache, int64_t max_tokens)
    : model_(model),
      cache_(cache),
      buffers_(model.CacheLayout(), model.config().num_attention_heads, max_tokens, kDrawNumbers,
               model.device()) {
  model.ReservePositions(max_tokens);
}

bool DecodeGraphs::Takes(const Pass& pass) const {
  const DecodeShape shape = ShapeOf(pass);
  if (shape.rows < 1 || shape.rows > kMaxDecodeRows || shape.wanted < 1) return false;
  return std::ranges::all_of(pass.sequences,
                             [&](const DecodeInput& input) {
                               const int64_t rows = std::ssize(input.tokens);
                               return rows <= ops::kFewRows && input.images == nullptr &&
                                      input.start + rows <= buffers_.max_tokens() &&
                                      !(input.records_routing && cache_.routing().defined());
                             }) &&
         std::ranges::all_of(pass.rows, [&](const OutputRow& row) {
           return DrawsOnDevice(row, model_.num_token_ids());
         });
}

at::Tensor DecodeGraphs::Compute(const Key& key) const {
  const at::Tensor hidden = model_.DecodeBatched(cache_, buffers_.Batch(key.shape));
  const at::Tensor numbers = buffers_.DeviceExtra(key.shape);
  std::vector<at::Tensor> drawn;
  const int64_t chunk = LogitsRows(model_.num_token_ids());
  for (int64_t begin = 0; begin < key.shape.wanted; begin += chunk) {
    const int64_t count = std::min(chunk, key.shape.wanted - begin);
    drawn.push_back(DrawTokens(model_.ForwardLogits(ops::Narrow(hidden, 0, begin, count)),
                               numbers.narrow(1, begin, count),
                               {.has_greedy = true, .has_given = true, .has_cuts = key.has_cuts}));
  }
  return drawn.size() == 1 ? drawn.front() : at::cat(drawn);
}

absl::Status DecodeGraphs::Capture(const Key& key, Captured& captured) {
  const auto first = std::ranges::find_if(
      graphs_, [](const auto& known) { return known.second.graph != nullptr; });
  auto graph = DeviceGraph::Make(model_.device(),
                                 first == graphs_.end() ? nullptr : first->second.graph.get());
  return CatchTorchErrors(absl::StrCat("capture of a CUDA graph of ", key.shape.rows,
                                       " rows, which enforce_eager: true does without"),
                          [&] {
                            graph->Begin();
                            captured.drawn = Compute(key);
                            graph->End();
                            captured.graph = std::move(graph);
                            return absl::OkStatus();
                          });
}

absl::StatusOr<at::Tensor> DecodeGraphs::Run(const Pass& pass, const at::Tensor& drawn) {
  TANDEM_RETURN_IF_ERROR(model_.CheckInputs(cache_, pass.sequences, drawn));
  const DecodeShape exact = ShapeOf(pass);
  int64_t wanted = 0;
  for (const DecodeInput& input : pass.sequences) wanted += std::ssize(input.output_rows);
  TORCH_CHECK(wanted == exact.wanted, "the sequences have ", wanted,
              " output rows, and the pass has ", exact.wanted);
  Key key = {
      .shape = {.rows = PaddedDecodeRows(exact.rows), .wanted = PaddedDecodeRows(exact.wanted)}};
  buffers_.Fill(key.shape, pass.sequences);
  key.has_cuts = WriteDrawNumbers(pass.rows, model_.num_token_ids(), key.shape.wanted,
                                  buffers_.Extra(key.shape).data())
                     .has_cuts;
  buffers_.Upload(key.shape);
  if (drawn.defined()) buffers_.ReplaceTokens(key.shape, exact.rows, drawn);
  const auto [known, is_first] = graphs_.try_emplace(key);
  if (is_first) return Compute(key);
  Captured& captured = known->second;
  if (captured.graph == nullptr) TANDEM_RETURN_IF_ERROR(Capture(key, captured));
  captured.graph->Replay();
  return captured.drawn;
}

}  // namespace tandem::rollout
