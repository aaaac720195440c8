#include "services/rollout/engine/ranks/engine_ranks.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <numeric>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "common/base/errors/error.h"
#include "common/base/errors/status_macros.h"
#include "common/model/compute_setup.h"
#include "common/model/config/model_config.h"
#include "common/model/device_check.h"
#include "common/ranks/communicator_group.h"
#include "common/ranks/rank_agreement.h"
#include "common/speculator/speculator_memory.h"
#include "common/tensor/aten/aten_bytes.h"
#include "services/rollout/engine/blocks/lane_storage.h"

namespace tandem::rollout {
namespace {

absl::StatusOr<ModelConfig> ReadConfig(const std::string& field, const std::string& directory) {
  absl::StatusOr<ModelConfig> config = LoadModelConfig(directory);
  if (!config.ok()) return PrependFieldPath(field, config.status());
  return config;
}

// Checks the layout, and returns the blocks of the caches for which this rank has memory.
absl::StatusOr<CacheBlocks> PlanLayout(const EngineOptions& options, at::Device senior_device,
                                       at::Device junior_device) {
  TANDEM_ASSIGN_OR_RETURN(const ModelConfig senior,
                          ReadConfig("senior.model", options.senior.model));
  std::optional<ModelConfig> junior_config;
  if (!options.junior.model.empty()) {
    TANDEM_ASSIGN_OR_RETURN(junior_config, ReadConfig("junior.model", options.junior.model));
  }
  const ModelConfig* const junior = junior_config.has_value() ? &*junior_config : nullptr;
  TANDEM_RETURN_IF_ERROR(
      CheckRankLayout(options.layout, senior, junior, options.environment.world_size));
  speculator::SpeculatorSize speculator;
  if (!options.senior_speculator.empty()) {
    const auto measured = speculator::MeasureSpeculator(
        options.senior_speculator, senior.hidden_size, HasPackedLanes(options.compute));
    if (!measured.ok()) return PrependFieldPath("senior.speculator", measured.status());
    speculator = *measured;
  }
  RolloutMemoryOptions memory = ToMemoryOptions(options, options.environment.rank, speculator);
  if (senior_device.is_cuda()) {
    TANDEM_RETURN_IF_ERROR(MeasureDevice(senior_device.index(), options.compute.ranks_per_gpu,
                                         /*place=*/0, memory.free));
    if (junior_device != senior_device) {
      TANDEM_RETURN_IF_ERROR(
          MeasureDevice(junior_device.index(), /*ranks=*/1, /*place=*/1, memory.free));
    }
  }
  return PlanCacheBlocks(senior, junior, memory);
}

// Returns the blocks that every rank has memory for. Collective.
CacheBlocks AgreeOnBlocks(CacheBlocks blocks, ranks::ServerRanks& server) {
  double negated[] = {-static_cast<double>(blocks.senior.generator),
                      -static_cast<double>(blocks.junior.generator)};
  ranks::ReduceNumbers(*server.world(), absl::MakeSpan(negated), ranks::Reduction::kMax);
  blocks.senior.generator = static_cast<int64_t>(-negated[0]);
  blocks.junior.generator = static_cast<int64_t>(-negated[1]);
  return blocks;
}

// Returns the junior's device on this rank; `device` is the senior's.
absl::StatusOr<at::Device> JuniorDevice(const EngineOptions& options, at::Device device) {
  const auto rank = static_cast<size_t>(options.environment.rank);
  const std::vector<int32_t>& devices = options.layout.junior_gpu_devices;
  if (options.junior.model.empty() || rank >= devices.size()) return device;
  const std::string field = absl::StrCat("junior.gpu_devices[", rank, "]");
  if (!device.is_cuda()) return InvalidField(field, "needs compute.device cuda");
  const c10::impl::VirtualGuardImpl cuda(at::kCUDA);
  if (devices[rank] < 0 || devices[rank] >= cuda.deviceCount()) {
    return FieldError(
        absl::StatusCode::kFailedPrecondition, field,
        absl::StrCat(devices[rank], ", but this machine has ", cuda.deviceCount(), " devices"));
  }
  return at::Device(at::kCUDA, static_cast<at::DeviceIndex>(devices[rank]));
}

// Returns the placement of a lane's model on `device`; `base` is that of the server.
Placement PlacementOf(const LaneOptions& lane, const EngineOptions& options, at::Device device,
                      Placement base) {
  const LaneStorage storage = StorageOf(lane, options);
  base.device = device;
  base.dtype = ToScalarType(storage.dtype);
  base.weight_format = storage.weight_format;
  base.activation_dtype = ToScalarType(storage.activation_dtype);
  return base;
}

// Makes a process group of the first `size` ranks of the server. Collective over all ranks.
std::shared_ptr<ranks::Communicator> GroupOfFirst(int64_t size, const std::string& name,
                                                  const ranks::SplitOptions& options,
                                                  ranks::Communicator& world) {
  std::vector<int> ranks(static_cast<size_t>(size));
  std::iota(ranks.begin(), ranks.end(), 0);
  return world.Split(name, {ranks}, options);
}

// Joins the first `size` ranks of the server. Collective over all ranks.
LaneRanks JoinLane(const std::string& name, int64_t size, bool enable_expert_parallel,
                   const Placement& placement, ranks::Communicator& world) {
  LaneRanks lane;
  lane.group =
      GroupOfFirst(size, name, {.device = placement.device, .timeout = std::nullopt}, world);
  lane.placement = placement;
  if (lane.group == nullptr) {
    lane.placement.holds_block = [](int64_t) { return false; };
  } else if (size > 1) {
    lane.placement.shard_index = lane.group->rank();
    lane.placement.shard_count = size;
    lane.placement.shard_group = std::make_shared<ranks::CommunicatorGroup>(lane.group);
    lane.placement.experts = ExpertsOfRank(enable_expert_parallel, lane.group->rank(), size);
  }
  return lane;
}

}  // namespace

absl::StatusOr<EngineRanks> JoinRanks(const EngineOptions& options) {
  TANDEM_ASSIGN_OR_RETURN(const Placement placement, SetUpCompute(options.compute));
  EngineRanks ranks;
  TANDEM_ASSIGN_OR_RETURN(ranks.server,
                          ranks::ServerRanks::Connect({.environment = options.environment,
                                                       .device = placement.device,
                                                       .timeouts = options.rank_timeouts}));
  TANDEM_RETURN_IF_ERROR(ranks.server->CheckSame("configuration", options.configuration));
  const absl::StatusOr<at::Device> junior_device = JuniorDevice(options, placement.device);
  const absl::StatusOr<CacheBlocks> blocks =
      junior_device.ok() ? PlanLayout(options, placement.device, *junior_device)
                         : absl::StatusOr<CacheBlocks>(junior_device.status());
  TANDEM_RETURN_IF_ERROR(ranks.server->Agree(blocks.status()));
  ranks.blocks = AgreeOnBlocks(*blocks, *ranks.server);
  ranks::Communicator& world = *ranks.server->world();
  ranks.senior =
      JoinLane("senior", options.layout.tensor_parallel_size, options.layout.enable_expert_parallel,
               PlacementOf(options.senior, options, placement.device, placement), world);
  if (options.layout.tensor_parallel_size > 1) {
    ranks.senior.weights_group =
        GroupOfFirst(options.layout.tensor_parallel_size, "senior weights",
                     {.device = at::kCPU, .timeout = ranks::kNoTimeLimit}, world);
  }
  if (!options.junior.model.empty()) {
    ranks.junior = JoinLane("junior", options.layout.junior_tensor_parallel_size,
                            options.layout.junior_enable_expert_parallel,
                            PlacementOf(options.junior, options, *junior_device, placement), world);
  }
  return ranks;
}

}  // namespace tandem::rollout
