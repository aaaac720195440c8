// The weights of a speculator in an update of its model's weights
// (common/weights/weight_transfer.h), at the sender and at the receiver.
#ifndef TANDEM_COMMON_SPECULATOR_SPECULATOR_UPDATE_H_
#define TANDEM_COMMON_SPECULATOR_SPECULATOR_UPDATE_H_

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/speculator/speculator.h"
#include "common/tensor/aten/named_tensors.h"
#include "common/weights/staged_weight_receiver.h"
#include "common/weights/weight_transfer.h"

namespace tandem::speculator {

// Returns the name of a parameter in an update.
std::string NameInUpdate(const SpeculatorParameter& parameter);

// Returns the parameters, in order, under the names of an update. They share storage with the
// speculator.
NamedTensors WeightsToSend(const Speculator& speculator);

// Describes the speculator to a receiver. Reads all values, for their digest.
ComponentManifest ManifestOf(const Speculator& speculator);

// Describes what a receiver with this speculator takes, which was loaded from a directory; its
// weights are version 0.
ReceivedComponent ReceivedBy(const Speculator& speculator);

// New weights of a speculator, made beside those that draft. Used by one thread at a time.
class PreparedSpeculator {
 public:
  // Makes room for the weights of a speculator like `speculator`. Errors of its kind.
  static absl::StatusOr<std::unique_ptr<PreparedSpeculator>> Make(const Speculator& speculator);

  // Takes a parameter, by its name in an update, of any device and floating-point type.
  // INVALID_ARGUMENT names a tensor of another name or shape.
  absl::Status Add(const std::string& name, const at::Tensor& value);
  // Exchanges the weights with those of `speculator`, which is like the one of Make. Reads no
  // value.
  void SwapWith(const Speculator& speculator) const;

 private:
  explicit PreparedSpeculator(std::unique_ptr<Speculator> next) : next_(std::move(next)) {}

  const std::unique_ptr<Speculator> next_;
};

}  // namespace tandem::speculator

#endif  // TANDEM_COMMON_SPECULATOR_SPECULATOR_UPDATE_H_
