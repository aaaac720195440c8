#include "common/base/errors/error.h"

#include <gtest/gtest.h>

#include <vector>

namespace tandem {
namespace {

TEST(ErrorTest, FieldPathIsAttachedAndReadable) {
  const absl::Status status = InvalidField("sampling.top_p", "must be in (0, 1], got 2");
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(status.message(), "sampling.top_p: must be in (0, 1], got 2");
  EXPECT_EQ(FieldPath(status), "sampling.top_p");
}

TEST(ErrorTest, PrependKeepsCodeReasonAndRetry) {
  absl::Status status = FieldError(absl::StatusCode::kOutOfRange, "[2]", "too large");
  status = WithRetryAfter(WithReason(status, reason::kQueueFull), 250);
  status = PrependFieldPath("prompt_token_ids", status);
  EXPECT_EQ(status.code(), absl::StatusCode::kOutOfRange);
  EXPECT_EQ(status.message(), "prompt_token_ids[2]: too large");
  EXPECT_EQ(FieldPath(status), "prompt_token_ids[2]");
  EXPECT_EQ(Reason(status), "QUEUE_FULL");
  EXPECT_TRUE(HasReason(status, reason::kQueueFull));
  EXPECT_FALSE(HasReason(status, reason::kLoading));
  EXPECT_EQ(RetryAfterMilliseconds(status), 250);
}

TEST(ErrorTest, PrependNamesAStatusWithoutPath) {
  const absl::Status status = PrependFieldPath("samples[0]", absl::NotFoundError("gone"));
  EXPECT_EQ(FieldPath(status), "samples[0]");
  EXPECT_TRUE(PrependFieldPath("x", absl::OkStatus()).ok());
}

TEST(ErrorTest, TheLineOfAnErrorHasItsDetailsInOneOrder) {
  // The order of Status::ToString depends on addresses: several statuses show both.
  std::vector<absl::Status> kept;
  for (int i = 0; i < 100; ++i) {
    kept.push_back(WithReason(FieldError(absl::StatusCode::kFailedPrecondition, "step", "is 6"),
                              reason::kStalePolicyVersion));
    EXPECT_EQ(ErrorLine(kept.back()),
              "FAILED_PRECONDITION: step: is 6 [tandem/field='step'] "
              "[tandem/reason='STALE_POLICY_VERSION']");
  }
  EXPECT_EQ(ErrorLine(absl::OkStatus()), "OK");
}

}  // namespace
}  // namespace tandem
