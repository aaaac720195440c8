// New weights of a model that infers, made beside those that serve.
//
//   const auto prepared = model.PrepareWeights();      // any thread
//   for (…) TANDEM_RETURN_IF_ERROR(prepared->Add(name, tensor));
//   TANDEM_RETURN_IF_ERROR(prepared->CheckComplete());
//   model.Adopt(*prepared);                            // the thread of the passes, between two
#ifndef TANDEM_COMMON_MODEL_PARAMETERS_PREPARED_WEIGHTS_H_
#define TANDEM_COMMON_MODEL_PARAMETERS_PREPARED_WEIGHTS_H_

#include <ATen/core/Tensor.h>

#include <string>
#include <utility>

#include "absl/status/status.h"
#include "common/model/loading/parameter_intake.h"
#include "common/model/parameters/parameter_store.h"

namespace tandem {

// Used by one thread at a time.
class PreparedWeights {
 public:
  // See Model::PrepareWeights.
  PreparedWeights(ParameterSet set, bool tied)
      : set_(std::move(set)), intake_(set_.parameters, tied) {}
  PreparedWeights(const PreparedWeights&) = delete;
  PreparedWeights& operator=(const PreparedWeights&) = delete;

  // Checks a whole tensor, of any device and floating-point type, and converts or packs this
  // process's shard of it. Own kernels run on the caller's thread alone (see ComputeAlone in
  // compute_setup.h for ATen's). Nothing keeps `whole`. Errors of ParameterIntake::Accept; may
  // throw c10::Error.
  absl::Status Add(const std::string& name, const at::Tensor& whole);
  // Errors of ParameterIntake::CheckComplete.
  absl::Status CheckComplete() const { return intake_.CheckComplete(); }

 private:
  friend class Model;

  ParameterSet set_;
  ParameterIntake intake_;
};

}  // namespace tandem

#endif  // TANDEM_COMMON_MODEL_PARAMETERS_PREPARED_WEIGHTS_H_
