#include "services/rollout/engine/models/torch_runner.h"

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <optional>
#include <span>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/errors/error.h"
#include "common/base/errors/memory_error.h"
#include "common/base/errors/status_macros.h"
#include "common/coauthoring/tandem_sampler.h"
#include "common/ops/linear/low_rank_adapter.h"
#include "common/ops/threads/parallel_for.h"
#include "common/tensor/aten/aten_bytes.h"
#include "common/tensor/aten/catch_torch_errors.h"
#include "common/tensor/aten/device_copies.h"
#include "services/rollout/engine/rollout_memory.h"

namespace tandem::rollout {
namespace {

absl::StatusOr<SampledToken> Read(std::span<const float> logits, const OutputRow& row,
                                  const std::optional<kernels::LogitRow>& statistics) {
  thread_local TandemSampler sampler;
  sampler.SetStatistics(statistics);
  return ReadRow(sampler, logits, row);
}

}  // namespace

TorchRunner::TorchRunner(std::shared_ptr<Model> model, int64_t num_blocks, DType cache_dtype,
                         std::unique_ptr<const speculator::Speculator> speculator,
                         Adapters adapters, std::optional<c10::Stream> stream,
                         std::optional<int64_t> graph_tokens)
    : model_(std::move(model)),
      adapters_(adapters),
      stream_(stream),
      cache_(model_->CacheLayout(), num_blocks, model_->device(), ToScalarType(cache_dtype),
             model_->config().RoutingLayout()),
      image_rows_(model_.get(), kImageRowBytes),
      speculator_(std::move(speculator)) {
  if (!graph_tokens.has_value()) return;
  TORCH_CHECK(stream_.has_value() && speculator_ == nullptr,
              "graphs need a stream, and have no hidden states for a speculator");
  graphs_.emplace(*model_, cache_, *graph_tokens);
}

std::optional<c10::Stream> TorchRunner::NewStream(at::Device device) {
  if (device.is_cpu()) return std::nullopt;
  return c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device);
}

void TorchRunner::EnterStream(std::optional<c10::StreamGuard>& guard) {
  if (!stream_.has_value()) return;
  const at::Device device = stream_->device();
  if (!before_.has_value()) before_.emplace(device.type());
  before_->record(c10::impl::VirtualGuardImpl(device.type()).getDefaultStream(device));
  before_->block(*stream_);
  guard.emplace(*stream_);
}

void TorchRunner::WaitForStream() {
  if (!stream_.has_value()) return;
  c10::impl::VirtualGuardImpl(stream_->device_type()).synchronizeStream(*stream_);
}

absl::Status TorchRunner::Run(const Pass& pass, PassResults& results) {
  TANDEM_RETURN_IF_ERROR(Start(pass, results));
  return Finish();
}

absl::Status TorchRunner::Start(const Pass& pass, PassResults& results) {
  TANDEM_RETURN_IF_ERROR(Compute(pass, &results, draws_[1 - newest_]));
  newest_ = 1 - newest_;
  has_two_ = pass.follows;
  has_rows_ = !pass.rows.empty();
  return absl::OkStatus();
}

absl::Status TorchRunner::Finish() {
  return CatchTorchErrors("forward pass", [&] {
    if (!has_rows_) WaitForStream();
    draws_[std::exchange(has_two_, false) ? 1 - newest_ : newest_].Read();
    return absl::OkStatus();
  });
}

absl::Status TorchRunner::Follow(std::span<const BlockCopy> copies,
                                 std::span<const DecodeInput> sequences) {
  return Compute({.copies = copies, .sequences = sequences, .rows = {}}, nullptr, draws_[newest_]);
}

absl::Status TorchRunner::Draft(std::span<const DraftRequest> requests, int64_t count,
                                std::vector<int32_t>& drafts) {
  if (speculator_ == nullptr) return ModelRunner::Draft(requests, count, drafts);
  const int64_t num_rows = hidden_.defined() ? hidden_.size(0) : 0;
  std::vector<int64_t> rows, tokens;
  for (const DraftRequest& request : requests) {
    if (request.row < 0 || request.row >= num_rows) {
      return InvalidField("row", absl::StrCat(request.row, " is not one of ", num_rows, " rows"));
    }
    rows.push_back(request.row);
    tokens.push_back(request.token);
  }
  return CatchTorchErrors("drafts", [&]() -> absl::Status {
    const c10::InferenceMode inference_mode;
    std::optional<c10::StreamGuard> on_stream;
    EnterStream(on_stream);
    TANDEM_ASSIGN_OR_RETURN(
        const at::Tensor proposed,
        speculator_->Draft(hidden_.index_select(0, CopyToDevice(rows, hidden_.device())),
                           CopyToDevice(tokens, hidden_.device()), count));
    const at::Tensor values = proposed.to(at::kCPU, at::kInt).contiguous();
    const int32_t* const data = values.const_data_ptr<int32_t>();
    drafts.assign(data, data + values.numel());
    return absl::OkStatus();
  });
}

absl::Status TorchRunner::ReadRouting(std::span<const int32_t> blocks, int64_t count,
                                      TokenExperts& experts) {
  const RoutingCache layout = model_->config().RoutingLayout();
  if (layout.layers == 0) return ModelRunner::ReadRouting(blocks, count, experts);
  return CatchTorchErrors("routed experts", [&] {
    const c10::InferenceMode inference_mode;
    std::vector<at::Tensor> tokens;
    for (int64_t begin = 0; begin < count; begin += kKvBlockTokens) {
      const int64_t block = blocks[static_cast<size_t>(begin / kKvBlockTokens)];
      tokens.push_back(cache_.routing().narrow(0, block * kKvBlockTokens,
                                               std::min(kKvBlockTokens, count - begin)));
    }
    const at::Tensor ids = at::cat(tokens).to(at::kCPU, at::kInt).contiguous();
    const int32_t* const data = ids.const_data_ptr<int32_t>();
    experts.layers = layout.layers;
    experts.experts_per_token = layout.experts_per_token;
    experts.ids.assign(data, data + ids.numel());
    return absl::OkStatus();
  });
}

void TorchRunner::ReadImageRows(std::span<const DecodeInput> sequences) {
  image_rows_of_inputs_.clear();
  for (size_t i = 0; i < sequences.size(); ++i) {
    if (sequences[i].images == nullptr) continue;
    image_rows_of_inputs_.resize(sequences.size());
    image_rows_of_inputs_[i] = image_rows_.Of(sequences[i]);
  }
  if (!image_rows_of_inputs_.empty()) image_rows_.Trim();
}

at::Tensor TorchRunner::SendStatistics(const at::Tensor& logits, std::span<const OutputRow> rows) {
  const at::Tensor statistics = RowStatistics(logits, rows);
  if (!statistics.defined()) return {};
  const auto pinned = at::dtype(at::kFloat).pinned_memory(true);
  return at::empty(statistics.sizes(), pinned).copy_(statistics, /*non_blocking=*/true);
}

at::Tensor TorchRunner::OnHost(const at::Tensor& logits) {
  if (!logits.is_cuda()) return logits.to(at::kCPU, at::kFloat).contiguous();
  if (!host_logits_.defined() || host_logits_.size(0) < logits.size(0)) {
    host_logits_ = at::empty(logits.sizes(), at::dtype(at::kFloat).pinned_memory(true));
  }
  return ops::Narrow(host_logits_, 0, 0, logits.size(0)).copy_(logits);
}

absl::Status TorchRunner::Compute(const Pass& pass, PassResults* results, DeviceDraws& draws) {
  if (results != nullptr) results->assign(pass.rows.size(), SampledToken());
  hidden_.reset();
  draws.Clear();
  const absl::Status computed = CatchTorchErrors("forward pass", [&]() -> absl::Status {
    const c10::InferenceMode inference_mode;
    std::optional<c10::StreamGuard> on_stream;
    EnterStream(on_stream);
    std::optional<ops::WithoutAdapters> without_adapters;
    if (adapters_ == Adapters::kOff) without_adapters.emplace();
    ReadImageRows(pass.sequences);  // whose tensors outlive the pass
    const ops::PassMemoryScope scope(memory_);
    const at::Tensor drawn = pass.follows ? draws_[newest_].Tokens() : at::Tensor();
    for (const BlockCopy& copy : pass.copies) cache_.CopyBlock(copy.from, copy.to);
    if (graphs_.has_value() && results != nullptr && graphs_->Takes(pass)) {
      TANDEM_ASSIGN_OR_RETURN(const at::Tensor rows, graphs_->Run(pass, drawn));
      draws.Add(rows, *results);
      draws.Send();
      return absl::OkStatus();
    }
    TANDEM_ASSIGN_OR_RETURN(const at::Tensor hidden,
                            model_->Decode(cache_, pass.sequences, image_rows_of_inputs_, drawn));
    const int64_t total = hidden.size(0);
    TORCH_CHECK(results == nullptr || total == std::ssize(pass.rows), "the sequences have ", total,
                " output rows, and the pass has ", pass.rows.size());
    if (speculator_ != nullptr) hidden_ = hidden;
    const int64_t width = model_->num_token_ids();
    const int64_t chunk = LogitsRows(width);
    for (int64_t begin = 0; begin < total; begin += chunk) {
      const int64_t count = std::min(chunk, total - begin);
      const at::Tensor rows_of_chunk = model_->ForwardLogits(ops::Narrow(hidden, 0, begin, count));
      if (results == nullptr) continue;
      const auto chunk_rows = pass.rows.subspan(begin, count);
      if (rows_of_chunk.is_cuda() && std::ranges::all_of(chunk_rows, [&](const OutputRow& row) {
            return DrawsOnDevice(row, width);
          })) {
        draws.Draw(rows_of_chunk, chunk_rows, std::span(*results).subspan(begin, count));
        continue;
      }
      const at::Tensor statistics = SendStatistics(rows_of_chunk, chunk_rows);
      // The host waits for a GPU here, and where it reads the draws.
      const at::Tensor logits = OnHost(rows_of_chunk);
      const auto statistics_of = [&](int64_t row) -> std::optional<kernels::LogitRow> {
        if (!statistics.defined()) return std::nullopt;
        const float* const values = statistics.const_data_ptr<float>();
        return kernels::LogitRow{.max = values[row], .sum = values[count + row]};
      };
      const float* const data = logits.const_data_ptr<float>();
      constexpr int64_t kWorkPerLogit = 16;  // in multiply-adds: about one exponential
      ops::ParallelFor(count, width * kWorkPerLogit, [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; ++i) {
          (*results)[begin + i] = Read({data + i * width, static_cast<size_t>(width)},
                                       pass.rows[begin + i], statistics_of(i));
        }
      });
    }
    draws.Send();
    return absl::OkStatus();
  });
  if (!computed.ok()) {
    // Operations that the pass began must not meet those of the next one.
    draws.Clear();
    WaitForStream();
  }
  return NameMemorySettings(computed, kMemorySettings);
}

}  // namespace tandem::rollout
