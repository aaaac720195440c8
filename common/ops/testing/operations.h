// For tests: counts operations of ATen. On a GPU most of them are launched, whatever their size.
#ifndef TANDEM_COMMON_OPS_TESTING_OPERATIONS_H_
#define TANDEM_COMMON_OPS_TESTING_OPERATIONS_H_

#include <ATen/record_function.h>

#include <cstdint>
#include <memory>

namespace tandem::ops {

// Returns the number of ATen's operations that fn() calls on this thread.
template <typename Function>
int64_t Operations(const Function& fn) {
  thread_local int64_t count;
  count = 0;
  const at::CallbackHandle callback = at::addThreadLocalCallback(
      at::RecordFunctionCallback([](const at::RecordFunction&)
                                     -> std::unique_ptr<at::ObserverContext> {
        ++count;
        return nullptr;
      }).scopes({at::RecordScope::FUNCTION}));
  fn();
  at::removeCallback(callback);
  return count;
}

}  // namespace tandem::ops

#endif  // TANDEM_COMMON_OPS_TESTING_OPERATIONS_H_
