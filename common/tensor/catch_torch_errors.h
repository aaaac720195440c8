// Turns exceptions of libtorch into a Status, at the edge of an engine or a strategy.
#ifndef TANDEM_COMMON_TENSOR_CATCH_TORCH_ERRORS_H_
#define TANDEM_COMMON_TENSOR_CATCH_TORCH_ERRORS_H_

#include <c10/util/Exception.h>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "common/base/catch_exceptions.h"

namespace tandem {

// Calls `body()`, which returns a Status or StatusOr. An exception becomes INTERNAL;
// RESOURCE_EXHAUSTED if memory ran out, UNIMPLEMENTED if libtorch says so. `what` names the work in
// the message.
template <typename Body>
auto CatchTorchErrors(absl::string_view what, Body&& body) -> decltype(body()) {
  return CatchExceptions(what, [&]() -> decltype(body()) {
    try {
      return body();
    } catch (const c10::NotImplementedError& error) {
      return absl::UnimplementedError(absl::StrCat(what, ": ", error.what_without_backtrace()));
    } catch (const c10::OutOfMemoryError& error) {
      return absl::ResourceExhaustedError(absl::StrCat(what, ": ", error.what_without_backtrace()));
    } catch (const c10::Error& error) {
      return absl::InternalError(absl::StrCat(what, ": ", error.what_without_backtrace()));
    }
  });
}

}  // namespace tandem

#endif  // TANDEM_COMMON_TENSOR_CATCH_TORCH_ERRORS_H_
