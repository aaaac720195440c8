// Operators of a library of devices that is loaded beside the program: those of the simulated GPUs.
#ifndef TANDEM_COMMON_TENSOR_ATEN_DEVICE_OPERATORS_H_
#define TANDEM_COMMON_TENSOR_ATEN_DEVICE_OPERATORS_H_

#include <ATen/core/dispatch/Dispatcher.h>

namespace tandem {

inline bool HasOperator(const char* name) {
  return c10::Dispatcher::singleton().findSchema({name, ""}).has_value();
}

template <typename Result, typename... Arguments>
Result CallOperator(const char* name, Arguments... arguments) {
  return c10::Dispatcher::singleton()
      .findSchemaOrThrow(name, "")
      .template typed<Result(Arguments...)>()
      .call(arguments...);
}

}  // namespace tandem

#endif  // TANDEM_COMMON_TENSOR_ATEN_DEVICE_OPERATORS_H_
