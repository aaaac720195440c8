// Turns exceptions of libraries into a Status.
#ifndef TANDEM_COMMON_BASE_ERRORS_CATCH_EXCEPTIONS_H_
#define TANDEM_COMMON_BASE_ERRORS_CATCH_EXCEPTIONS_H_

#include <exception>
#include <new>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace tandem {

// Calls `body()`, which returns a Status or StatusOr. An exception becomes INTERNAL, one for memory
// RESOURCE_EXHAUSTED; `what` names the work in the message.
template <typename Body>
auto CatchExceptions(absl::string_view what, Body&& body) -> decltype(body()) {
  try {
    return body();
  } catch (const std::bad_alloc&) {
    return absl::ResourceExhaustedError(absl::StrCat(what, ": out of memory"));
  } catch (const std::exception& error) {
    return absl::InternalError(absl::StrCat(what, ": ", error.what()));
  } catch (...) {
    return absl::InternalError(absl::StrCat(what, ": unknown exception"));
  }
}

}  // namespace tandem

#endif  // TANDEM_COMMON_BASE_ERRORS_CATCH_EXCEPTIONS_H_
