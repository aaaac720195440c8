// Typed errors: an absl::Status with machine-readable details.
//
// Details travel as payloads of the status and become google.rpc details at the gRPC edge
// (common/rpc/calls/error_table.h). Code below the edge needs nothing but this header.
#ifndef TANDEM_COMMON_BASE_ERRORS_ERROR_H_
#define TANDEM_COMMON_BASE_ERRORS_ERROR_H_

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "common/base/errors/error_reasons.h"

namespace tandem {

// INVALID_ARGUMENT about one field. `path` is dotted, with indices: "samples[3].authorship_mask".
// The message reads "<path>: <message>".
absl::Status InvalidField(absl::string_view path, absl::string_view message);

// The same with another code, for a field that is well formed but refused
// (OUT_OF_RANGE for too long, FAILED_PRECONDITION for a stale version, UNIMPLEMENTED for "not
// yet").
absl::Status FieldError(absl::StatusCode code, absl::string_view path, absl::string_view message);

// `status` with "<prefix>." (or "<prefix>" before '[') put before its field path and message.
// Lets a nested check name only what it knows. OK stays OK; an error without a path gains `prefix`.
absl::Status PrependFieldPath(absl::string_view prefix, absl::Status status);

// `status` with `path` in place of its field path, in its message too. OK stays OK; an error
// without a path gains it.
absl::Status WithFieldPath(absl::string_view path, const absl::Status& status);

// The path that InvalidField or FieldError attached.
std::optional<std::string> FieldPath(const absl::Status& status);

// Attaches the name of one of the reasons of error_reasons.h. Clients may branch on it.
absl::Status WithReason(absl::Status status, const ErrorReason& reason);
// The same with a name that a peer sent, which may be newer than this build.
absl::Status WithReasonNamed(absl::Status status, absl::string_view name);

std::optional<std::string> Reason(const absl::Status& status);
bool HasReason(const absl::Status& status, const ErrorReason& reason);

// Attaches how long a caller should wait before it tries again.
absl::Status WithRetryAfter(absl::Status status, int64_t milliseconds);
std::optional<int64_t> RetryAfterMilliseconds(const absl::Status& status);

// Code, message and details in one line, details by name. Two processes write the same line for
// the same error: Status::ToString lists the details in an order of its own.
std::string ErrorLine(const absl::Status& status);

}  // namespace tandem

#endif  // TANDEM_COMMON_BASE_ERRORS_ERROR_H_
