#include "services/rollout/engine/ranks/shard_weights.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <set>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "common/base/errors/status_macros.h"
#include "common/model/compute_setup.h"
#include "common/ranks/rank_agreement.h"
#include "common/tensor/aten/aten_bytes.h"
#include "common/tensor/aten/catch_torch_errors.h"
#include "common/tensor/aten/peer_memory.h"
#include "common/weights/gpu/gpu_intake.h"
#include "common/weights/packing_thread.h"

namespace tandem::rollout {
namespace {

// Broadcasts the bytes, as Gloo has no bfloat16.
void BroadcastBytesOf(const at::Tensor& tensor, ranks::Communicator& group) {
  at::Tensor bytes = tensor.view(-1).view(at::kByte);
  group.Broadcast(bytes, 0);
}

// Reads tensors in memory of a sender's GPU, each with the sums that rank 0 found.
class MemoryReader {
 public:
  static absl::StatusOr<std::unique_ptr<MemoryReader>> Open(
      const std::vector<std::vector<GpuMemory>>& memories, c10::Stream stream) {
    std::vector<std::shared_ptr<const SharedBytes>> opened;
    for (const std::vector<GpuMemory>& memory : memories) {
      TANDEM_ASSIGN_OR_RETURN(opened.emplace_back(), PeerMemory::Open(memory, stream.device()));
    }
    return std::unique_ptr<MemoryReader>(new MemoryReader(std::move(opened), stream));
  }

  absl::Status Read(const RankedTensor& tensor, PreparedWeights& into) {
    std::vector<SharedRange> ranges;
    for (const RankedTensor::Range& range : tensor.ranges) {
      ranges.push_back(
          {.from = memories_.at(range.memory), .offset = range.offset, .size = range.size});
    }
    expected_.push_back({.name = tensor.spec.name, .sums = tensor.sums});
    return intake_.Take(tensor.spec, ranges,
                        [&](const at::Tensor& whole) { return into.Add(tensor.spec.name, whole); });
  }

  // Waits for what was read. DATA_LOSS unless it is what rank 0 has read.
  absl::Status Finish() {
    const std::vector<ReadTensor> read = intake_.TakeRead();
    for (size_t i = 0; i < read.size(); ++i) {
      if (read[i].sums == expected_[i].sums) continue;
      return absl::DataLossError(
          absl::StrCat("\"", read[i].name,
                       "\" has changed in the memory of the sender's GPU since it was verified; "
                       "the old weights are kept"));
    }
    return absl::OkStatus();
  }

 private:
  MemoryReader(std::vector<std::shared_ptr<const SharedBytes>> memories, c10::Stream stream)
      : memories_(std::move(memories)), intake_(stream) {}

  const std::vector<std::shared_ptr<const SharedBytes>> memories_;
  std::vector<ReadTensor> expected_;
  GpuIntake intake_;
};

}  // namespace

RankedWeights WeightsToSend(const std::vector<KeptTensor>& tensors, const Model& model) {
  RankedWeights weights;
  std::vector<const SharedBytes*> memories;
  std::set<absl::string_view> declared;
  for (const Parameter& parameter : model.DeclaredParameters()) {
    declared.insert(parameter.spec.name);
  }
  for (const KeptTensor& kept : tensors) {
    if (!declared.contains(kept.spec.name)) continue;  // a tied head
    RankedTensor& tensor = weights.tensors.emplace_back(
        RankedTensor{.spec = kept.spec, .ranges = {}, .sums = kept.sums});
    for (const SharedRange& range : kept.ranges) {
      const auto found = std::ranges::find(memories, range.from.get());
      const auto memory = static_cast<size_t>(found - memories.begin());
      if (found == memories.end()) {
        memories.push_back(range.from.get());
        weights.memories.push_back(dynamic_cast<const PeerMemory&>(*range.from).shared());
      }
      tensor.ranges.push_back({.memory = memory, .offset = range.offset, .size = range.size});
    }
  }
  return weights;
}

absl::Status SendWeights(const RankedWeights& weights, const std::vector<KeptTensor>& tensors,
                         ranks::Communicator& group) {
  auto kept = tensors.begin();  // which have the order of `weights`
  for (const RankedTensor& tensor : weights.tensors) {
    while (kept->spec.name != tensor.spec.name) ++kept;
    if (!tensor.ranges.empty()) continue;
    BroadcastBytesOf(kept->values.to(group.device()).contiguous(), group);
  }
  return ranks::AgreeByName(group, absl::OkStatus());
}

ShardUpdate::ShardUpdate(const RankedWeights& weights, ranks::Communicator& group,
                         const Model& model, ranks::ServerRanks& server,
                         std::optional<c10::Stream> intake)
    : thread_([this, weights, &group, &model, &server, intake] {
        BecomePackingThread();
        ComputeAlone(model.device());
        const absl::Status sent = CatchTorchErrors("weights", [&] {
          const absl::Status taken = Take(weights, group, model, intake);
          if (!ranks::AgreeByName(group, taken).ok()) weights_ = nullptr;
          return absl::OkStatus();
        });
        if (!sent.ok()) server.Fail(std::string(sent.message()));
      }) {}

absl::Status ShardUpdate::Take(const RankedWeights& weights, ranks::Communicator& group,
                               const Model& model, std::optional<c10::Stream> intake) {
  std::unique_ptr<MemoryReader> reader;
  const auto prepare = [&]() -> absl::Status {
    weights_ = model.PrepareWeights();
    if (weights.memories.empty()) return absl::OkStatus();
    TANDEM_ASSIGN_OR_RETURN(reader, MemoryReader::Open(weights.memories, intake.value()));
    return absl::OkStatus();
  };
  absl::Status status = CatchTorchErrors("weights", prepare);
  for (const RankedTensor& tensor : weights.tensors) {
    at::Tensor whole;
    if (tensor.ranges.empty()) {  // also after an error: rank 0 sends it
      whole = at::empty(tensor.spec.shape,
                        at::device(group.device()).dtype(ToScalarType(tensor.spec.dtype)));
      BroadcastBytesOf(whole, group);
    }
    if (!status.ok()) continue;
    status = CatchTorchErrors("weights", [&] {
      return whole.defined() ? weights_->Add(tensor.spec.name, whole)
                             : reader->Read(tensor, *weights_);
    });
  }
  if (!status.ok()) return status;
  return CatchTorchErrors("weights", [&]() -> absl::Status {
    if (reader != nullptr) TANDEM_RETURN_IF_ERROR(reader->Finish());
    return weights_->CheckComplete();
  });
}

void ShardUpdate::AdoptInto(Model& model) {
  thread_.join();
  model.Adopt(*weights_);
}

}  // namespace tandem::rollout
