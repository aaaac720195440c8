// Early returns for absl::Status and absl::StatusOr.
#ifndef TANDEM_COMMON_BASE_ERRORS_STATUS_MACROS_H_
#define TANDEM_COMMON_BASE_ERRORS_STATUS_MACROS_H_

#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

// TANDEM_RETURN_IF_ERROR(Check(x));
//
// Evaluates an expression of type absl::Status; returns it from the enclosing function, which
// returns a Status or a StatusOr, unless it is OK.
#define TANDEM_RETURN_IF_ERROR(expression)           \
  do {                                               \
    absl::Status tandem_status_ = (expression);      \
    if (!tandem_status_.ok()) return tandem_status_; \
  } while (false)

// TANDEM_ASSIGN_OR_RETURN(const Model model, LoadModel(path));
//
// Evaluates an expression of type absl::StatusOr<T>; returns its error, or assigns its value to
// `target`, a variable or a declaration of one. A type with a comma in it (std::map<K, V>) needs
// `auto`. It is several statements: give it braces below an `if`.
#define TANDEM_ASSIGN_OR_RETURN(target, expression) \
  TANDEM_ASSIGN_OR_RETURN_(target, expression, TANDEM_UNIQUE_NAME_(tandem_statusor_))

#define TANDEM_ASSIGN_OR_RETURN_(target, expression, statusor) \
  auto statusor = (expression);                                \
  if (!statusor.ok()) return std::move(statusor).status();     \
  target = *std::move(statusor)

// `prefix` and the line's number; __LINE__ is expanded only one macro further in.
#define TANDEM_UNIQUE_NAME_(prefix) TANDEM_JOIN_(prefix, __LINE__)
#define TANDEM_JOIN_(a, b) TANDEM_JOIN_EXPANDED_(a, b)
#define TANDEM_JOIN_EXPANDED_(a, b) a##b

#endif  // TANDEM_COMMON_BASE_ERRORS_STATUS_MACROS_H_
