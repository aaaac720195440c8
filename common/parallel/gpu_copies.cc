#include "common/parallel/gpu_copies.h"

#include <algorithm>
#include <cstddef>
#include <map>
#include <utility>

#include "absl/strings/string_view.h"
#include "common/base/errors/status_macros.h"
#include "common/base/machine/gpu_memory.h"
#include "common/parallel/whole_parameters.h"
#include "common/ranks/rank_agreement.h"
#include "common/tensor/aten/catch_torch_errors.h"
#include "common/weights/gpu/copy_parts.h"
#include "common/weights/gpu/gpu_snapshot.h"

namespace tandem::parallel {

absl::Status GpuCopies::Reserve(const std::vector<WeightSpec>& tensors) {
  return CatchTorchErrors("copy of the weights", [&]() -> absl::Status {
    ranks::Communicator& ranks = *strategy_.ranks().patient();
    TANDEM_ASSIGN_OR_RETURN(const bool released, ranks::FromRankZero<bool>(ranks, [&] {
                              return absl::StatusOr<bool>(ranks.size() == 1 || last_.expired());
                            }));
    if (!released) {
      return absl::ResourceExhaustedError(
          "an earlier publication still has its copy of the weights");
    }
    part_ = nullptr;
    others_ = nullptr;
    const std::vector<int> part_of = CutIntoParts(tensors, ranks.size());
    std::vector<WeightSpec> own;
    for (size_t i = 0; i < tensors.size(); ++i) {
      if (part_of[i] == ranks.rank()) own.push_back(tensors[i]);
    }
    absl::Status status;
    std::vector<GpuMemory> memory;
    if (!own.empty()) {
      auto made = GpuCopy::Make(std::move(own),
                                {.device = strategy_.model().device(), .most_bytes = most_bytes_},
                                !std::ranges::all_of(tensors, &IsFloat32));
      status = made.status();
      if (made.ok()) {
        part_ = *std::move(made);
        memory = {part_->memory()};
      }
    }
    TANDEM_ASSIGN_OR_RETURN(const auto memories, ranks::GatherStructs(ranks, memory));
    if (ranks.rank() == 0) {
      std::vector<GpuMemory> others;
      for (int rank = 1; rank < ranks.size(); ++rank) {
        const std::vector<GpuMemory>& theirs = memories[static_cast<size_t>(rank)];
        others.insert(others.end(), theirs.begin(), theirs.end());
      }
      if (!others.empty()) {
        auto opened = PeerMemory::Open(others, strategy_.model().device());
        status.Update(opened.status());
        if (opened.ok()) others_ = *std::move(opened);
      }
    }
    status = ranks::AgreeByName(ranks, status);
    if (!status.ok()) {
      others_ = nullptr;
      part_ = nullptr;
    }
    return status;
  });
}

absl::StatusOr<std::shared_ptr<const WeightSource>> GpuCopies::Fill(WeightManifest manifest,
                                                                    const NamedTensors& heads) {
  using Result = absl::StatusOr<std::shared_ptr<const WeightSource>>;
  return CatchTorchErrors("copy of the weights", [&]() -> Result {
    ranks::Communicator& ranks = *strategy_.ranks().patient();
    const std::vector<int> part_of = CutIntoParts(manifest.tensors, ranks.size());
    std::map<absl::string_view, int> ranks_of;
    for (size_t i = 0; i < part_of.size(); ++i) ranks_of[manifest.tensors[i].name] = part_of[i];
    const auto rank_of = [&](const Parameter& parameter) {
      const auto found = ranks_of.find(parameter.spec.name);
      return found == ranks_of.end() ? -1 : found->second;
    };
    TANDEM_RETURN_IF_ERROR(
        UseParametersOn(strategy_, rank_of, [&](TensorSource parameters) -> absl::Status {
          if (part_ == nullptr) return absl::OkStatus();
          return part_->Fill([&](TensorVisitor visit) -> absl::Status {
            TANDEM_RETURN_IF_ERROR(parameters(visit));
            for (const auto& [name, tensor] : heads) {
              if (ranks_of.at(name) != ranks.rank()) continue;
              TANDEM_RETURN_IF_ERROR(visit(name, tensor));
            }
            return absl::OkStatus();
          });
        }));
    TANDEM_ASSIGN_OR_RETURN(
        const auto sums,
        ranks::GatherStructs(ranks, part_ != nullptr ? part_->sums() : CopySums()));
    Result source = nullptr;
    if (ranks.rank() == 0) {
      source = MakeGpuSnapshot(std::move(manifest), std::move(part_), std::move(others_), sums);
    }
    TANDEM_RETURN_IF_ERROR(ranks::Agree(ranks, source.status()));
    last_ = *source;
    return source;
  });
}

}  // namespace tandem::parallel
