// Whether this process can compute where its configuration says. No torch in this header.
#ifndef TANDEM_COMMON_MODEL_DEVICE_CHECK_H_
#define TANDEM_COMMON_MODEL_DEVICE_CHECK_H_

#include <string>

#include "absl/status/status.h"

namespace tandem {

// FAILED_PRECONDITION for "compute.device" where `device` is "cuda" and this build, or this
// machine, has none.
absl::Status CheckDevice(const std::string& device);

}  // namespace tandem

#endif  // TANDEM_COMMON_MODEL_DEVICE_CHECK_H_
