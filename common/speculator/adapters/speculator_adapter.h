// Adapters join a speculator to the training of its language model, the base model: they make or
// load the speculator, compute its loss, and write its checkpoint.
//
//   TANDEM_ASSIGN_OR_RETURN(auto adapter, speculator::MakeSpeculatorAdapter("mlp", "adapter"));
//   TANDEM_RETURN_IF_ERROR(adapter->BuildAndAttach(settings, base, at::kCPU));
//   TANDEM_ASSIGN_OR_RETURN(const auto report, adapter->ComputeSpeculatorLoss(batch, options));
//
// A new kind is a model file and an adapter file like mlp_adapter.cc. The adapters of this folder
// are in the table of speculator_adapter.cc; those of a program register themselves:
//
//   const bool kRegistered = speculator::RegisterSpeculatorAdapter(MyKind(), MakeMyAdapter);
#ifndef TANDEM_COMMON_SPECULATOR_ADAPTERS_SPECULATOR_ADAPTER_H_
#define TANDEM_COMMON_SPECULATOR_ADAPTERS_SPECULATOR_ADAPTER_H_

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "common/speculator/adapters/speculator_loss.h"
#include "common/speculator/speculator.h"
#include "common/speculator/speculator_kind.h"
#include "common/speculator/speculator_settings.h"
#include "common/tensor/aten/tensor_copies.h"

namespace tandem::speculator {

// The folder of a speculator inside a checkpoint of its base model.
inline constexpr char kCheckpointFolder[] = "speculator";

class SpeculatorAdapter {
 public:
  virtual ~SpeculatorAdapter() = default;

  virtual const SpeculatorKind& kind() const = 0;

  // Makes or loads the speculator, whole and with gradients, on `device`. Called once, after the
  // base model is sharded. INVALID_ARGUMENT and UNIMPLEMENTED name the setting, or the file and
  // tensor of `path`; "path" for a speculator of another kind, hidden size or vocabulary.
  absl::Status BuildAndAttach(const SpeculatorSettings& settings, const BaseModelSizes& base,
                              at::Device device);

  // Computes the loss and adds its gradients to those of the speculator's parameters. No gradient
  // flows into `batch.hidden`. Errors as SpeculatorLoss::ForwardBackward.
  virtual absl::StatusOr<SpeculatorLossReport> ComputeSpeculatorLoss(
      const SpeculatorBatch& batch, const SpeculatorLossOptions& options) const;

  // Writes `directory`/speculator, which LoadSpeculator reads.
  absl::Status SaveCheckpoint(const std::string& directory) const;
  // Adds copies of what SaveCheckpoint writes to `copies`, and returns what writes them once they
  // have their values; it may run on another thread, while the speculator trains.
  absl::StatusOr<std::function<absl::Status(const std::string& directory)>> CopyCheckpoint(
      TensorCopies& copies) const;

  // Reads `directory`/speculator, which must have the attached speculator's kind, settings and
  // shapes, into memory of its own. NOT_FOUND where the checkpoint has no speculator;
  // INVALID_ARGUMENT and DATA_LOSS name file and tensor.
  absl::StatusOr<std::unique_ptr<Speculator>> ReadCheckpoint(const std::string& directory) const;
  // Makes the speculator of the settings once more.
  absl::StatusOr<std::unique_ptr<Speculator>> ReadInitial() const;
  // Replaces the values of the parameters by those of a speculator that one of the two above read.
  void Adopt(const Speculator& other);
  // ReadCheckpoint and Adopt; after an error nothing has changed.
  absl::Status LoadCheckpoint(const std::string& directory);

  // Declares the speculator of the settings: its parameters have no memory.
  absl::StatusOr<std::unique_ptr<Speculator>> Declare(const SpeculatorSettings& settings,
                                                      const BaseModelSizes& base) const;

  // The attached speculator.
  const Speculator& speculator() const { return *speculator_; }

 protected:
  // Returns the keys of config.json for a new speculator. INVALID_ARGUMENT names a setting that the
  // kind does not have.
  virtual absl::StatusOr<nlohmann::json> Config(const SpeculatorSettings& settings,
                                                const BaseModelSizes& base) const = 0;

 private:
  absl::StatusOr<std::unique_ptr<Speculator>> Read(const SpeculatorSettings& settings,
                                                   const BaseModelSizes& base,
                                                   const SpeculatorOptions& options) const;

  SpeculatorSettings settings_;
  BaseModelSizes base_;
  std::unique_ptr<Speculator> speculator_;
};

// INVALID_ARGUMENT for a setting that is not 0, empty or false, though the kind does not have it.
absl::Status RefuseSetting(absl::string_view name, bool is_set, const SpeculatorKind& kind);

using SpeculatorAdapterFactory = std::unique_ptr<SpeculatorAdapter> (*)();

// Adds a kind and its adapter, at the start of a program; returns true.
bool RegisterSpeculatorAdapter(const SpeculatorKind& kind, SpeculatorAdapterFactory factory);

// Makes the adapter of a kind. UNIMPLEMENTED for `field`, with the list of those that are there.
absl::StatusOr<std::unique_ptr<SpeculatorAdapter>> MakeSpeculatorAdapter(absl::string_view name,
                                                                         absl::string_view field);

}  // namespace tandem::speculator

#endif  // TANDEM_COMMON_SPECULATOR_ADAPTERS_SPECULATOR_ADAPTER_H_
