// Early returns for absl::Status and absl::StatusOr.
#ifndef TANDEM_COMMON_BASE_STATUS_MACROS_H_
#define TANDEM_COMMON_BASE_STATUS_MACROS_H_

#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#define TANDEM_STATUS_CONCAT_INNER_(a, b) a##b
#define TANDEM_STATUS_CONCAT_(a, b) TANDEM_STATUS_CONCAT_INNER_(a, b)

// Returns from the enclosing function when `expr`, an absl::Status, is not OK.
#define TANDEM_RETURN_IF_ERROR(expr)                                                       \
  do {                                                                                     \
    if (absl::Status tandem_status_ = (expr); !tandem_status_.ok()) return tandem_status_; \
  } while (false)

// TANDEM_ASSIGN_OR_RETURN(auto model, LoadModel(path)): declares or assigns `lhs` from a StatusOr,
// or returns its error. Wrap an `lhs` that holds a comma in parentheses-free `auto`.
#define TANDEM_ASSIGN_OR_RETURN(lhs, expr) \
  TANDEM_ASSIGN_OR_RETURN_IMPL_(TANDEM_STATUS_CONCAT_(tandem_statusor_, __LINE__), lhs, expr)
#define TANDEM_ASSIGN_OR_RETURN_IMPL_(statusor, lhs, expr) \
  auto statusor = (expr);                                  \
  if (!statusor.ok()) return std::move(statusor).status(); \
  lhs = *std::move(statusor)

#endif  // TANDEM_COMMON_BASE_STATUS_MACROS_H_
