// The checks of whole tensors that come, one by one, for the parameters of a model.
#ifndef TANDEM_COMMON_MODEL_LOADING_PARAMETER_INTAKE_H_
#define TANDEM_COMMON_MODEL_LOADING_PARAMETER_INTAKE_H_

#include <ATen/core/Tensor.h>

#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/model/parameters/parameter.h"

namespace tandem {

class ParameterIntake {
 public:
  // `parameters` are all of the model, which `tied` says to have its embedding for a head. They
  // outlive the intake.
  ParameterIntake(const std::vector<Parameter>& parameters, bool tied);

  // Returns the parameter that `tensor` is for, which this process need not hold; nullptr for the
  // head of a tied model. INVALID_ARGUMENT names a tensor that is no parameter, came before, has
  // another shape, or is not floating-point.
  absl::StatusOr<const Parameter*> Accept(const std::string& name, const at::Tensor& tensor);

  // INVALID_ARGUMENT names a parameter that has not come, or a tied head that does not have the
  // bits of the embedding as float32.
  absl::Status CheckComplete() const;

 private:
  const std::vector<Parameter>& parameters_;
  std::unordered_map<std::string, const Parameter*> by_name_;
  const bool tied_;
  std::set<std::string> seen_;
  // Digests of a tied model's embedding and head; empty until the tensor comes.
  std::string embedding_, tied_head_;
};

}  // namespace tandem

#endif  // TANDEM_COMMON_MODEL_LOADING_PARAMETER_INTAKE_H_
