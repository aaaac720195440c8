// Turns exceptions of libtorch into a Status, at the edge of an engine or a strategy.
#ifndef TANDEM_COMMON_TENSOR_ATEN_CATCH_TORCH_ERRORS_H_
#define TANDEM_COMMON_TENSOR_ATEN_CATCH_TORCH_ERRORS_H_

#include <c10/util/Exception.h>

#include <new>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "common/base/errors/catch_exceptions.h"
#include "common/base/errors/memory_error.h"

namespace tandem {

// Returns the Status for an exception of libtorch that is no c10::NotImplementedError:
// OutOfMemoryError where an allocator of the host, of a device or of a library on it had no memory,
// else INTERNAL with libtorch's text.
absl::Status TorchError(absl::string_view what, const c10::Error& error);

// Calls `body()`, which returns a Status or StatusOr. An exception becomes what TorchError says,
// UNIMPLEMENTED if libtorch says so. `what` names the work in the message.
template <typename Body>
auto CatchTorchErrors(absl::string_view what, Body&& body) -> decltype(body()) {
  return CatchExceptions(what, [&]() -> decltype(body()) {
    try {
      return body();
    } catch (const c10::NotImplementedError& error) {
      return absl::UnimplementedError(absl::StrCat(what, ": ", error.what_without_backtrace()));
    } catch (const c10::Error& error) {
      return TorchError(what, error);
    } catch (const std::bad_alloc&) {
      return OutOfMemoryError(what, "the host's memory");
    }
  });
}

}  // namespace tandem

#endif  // TANDEM_COMMON_TENSOR_ATEN_CATCH_TORCH_ERRORS_H_
