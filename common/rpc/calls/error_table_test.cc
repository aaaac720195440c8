#include "common/rpc/calls/error_table.h"

#include <gtest/gtest.h>

#include "common/base/errors/error.h"
#include "google/rpc/error_details.pb.h"

namespace tandem::rpc {
namespace {

TEST(ErrorTableTest, DetailsSurviveTheWire) {
  absl::Status status = FieldError(absl::StatusCode::kResourceExhausted, "prompts[2].seed", "full");
  status = WithRetryAfter(WithReason(status, reason::kQueueFull), 1250);
  const absl::Status back = FromGrpcStatus(ToGrpcStatus(status));
  EXPECT_EQ(back.code(), status.code());
  EXPECT_EQ(back.message(), "prompts[2].seed: full");
  EXPECT_EQ(FieldPath(back), "prompts[2].seed");
  EXPECT_EQ(Reason(back), "QUEUE_FULL");
  EXPECT_EQ(RetryAfterMilliseconds(back), 1250);
}

TEST(ErrorTableTest, DetailsAreGoogleRpcMessages) {
  google::rpc::Status proto;
  ASSERT_TRUE(proto.ParseFromString(
      ToGrpcStatus(WithReason(InvalidField("a.b", "bad"), reason::kNoJunior)).error_details()));
  EXPECT_EQ(proto.code(), 3);
  google::rpc::BadRequest bad_request;
  google::rpc::ErrorInfo info;
  ASSERT_EQ(proto.details_size(), 2);
  ASSERT_TRUE(proto.details(0).UnpackTo(&bad_request));
  EXPECT_EQ(bad_request.field_violations(0).field(), "a.b");
  ASSERT_TRUE(proto.details(1).UnpackTo(&info));
  EXPECT_EQ(info.reason(), "NO_JUNIOR");
  EXPECT_EQ(info.domain(), "tandem");
}

TEST(ErrorTableTest, EveryCodeMapsToItself) {
  for (int code = 0; code <= 16; ++code) {
    const absl::Status status(static_cast<absl::StatusCode>(code), code == 0 ? "" : "m");
    EXPECT_EQ(static_cast<int>(ToGrpcStatus(status).error_code()), code);
    EXPECT_EQ(FromGrpcStatus(ToGrpcStatus(status)), status);
    EXPECT_EQ(FromRpcStatus(ToRpcStatus(status)), status);
  }
}

TEST(ErrorTableTest, PlainErrorsHaveNoDetails) {
  EXPECT_TRUE(ToGrpcStatus(absl::InternalError("x")).error_details().empty());
}

TEST(ErrorTableTest, GarbageFromAPeerKeepsCodeAndMessage) {
  const absl::Status status =
      FromGrpcStatus(grpc::Status(grpc::StatusCode::NOT_FOUND, "gone", "\xff\xff garbage"));
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(status.message(), "gone");
  google::rpc::Status unknown;
  unknown.set_code(999);
  EXPECT_EQ(FromRpcStatus(unknown).code(), absl::StatusCode::kUnknown);
}

}  // namespace
}  // namespace tandem::rpc
