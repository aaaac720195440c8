#include "common/rpc/calls/decoded_size.h"

#include <gtest/gtest.h>

#include <string>

#include "common/rpc/calls/stream_message.h"
#include "common/rpc/testing/raw_call.h"
#include "google/protobuf/io/zero_copy_stream_impl_lite.h"
#include "tandem/rollout/v1/rollout.pb.h"

namespace tandem::rpc {
namespace {

using rollout::v1::ScoreRequest;

int64_t Decoded(const std::string& bytes) {
  google::protobuf::io::ArrayInputStream stream(bytes.data(), static_cast<int>(bytes.size()));
  return DecodedBytes(*ScoreRequest::descriptor(), stream);
}

std::string Repeat(const std::string& bytes, int count) {
  std::string all;
  for (int i = 0; i < count; ++i) all += bytes;
  return all;
}

// The count is never below what the message holds. protobuf's own leaves out spare capacity.
TEST(DecodedBytes, CoversWhatTheMessageTakes) {
  ScoreRequest request;
  for (int i = 0; i < 50; ++i) {
    auto* const sequence = request.add_sequences();
    for (int t = 0; t < 200; ++t) sequence->add_token_ids(t * 100);
  }
  request.GetReflection()->MutableUnknownFields(&request)->AddLengthDelimited(999, "unknown");
  request.GetReflection()->MutableUnknownFields(&request)->AddVarint(998, 5);
  const int64_t elements = 50 * 200 * 4;
  EXPECT_GE(Decoded(request.SerializeAsString()),
            static_cast<int64_t>(sizeof(ScoreRequest)) + elements);
  EXPECT_LT(Decoded(request.SerializeAsString()), 2 * request.ByteSizeLong() + 4 * elements);
}

TEST(DecodedBytes, CountsEmptyElements) {
  const int count = 1'000;
  const int64_t empty = Decoded("");
  const int64_t each = 16;  // the minimum that an object takes
  EXPECT_GE(Decoded(Repeat(std::string("\x0a\x00", 2), count)) - empty, count * each);
  EXPECT_GE(Decoded(Repeat(std::string("\xfa\x3e\x00", 3), count)) - empty, count * 32)
      << "an unknown string";
  EXPECT_GE(Decoded(Repeat(std::string("\xfb\x3e\xfc\x3e", 4), count)) - empty, count * 16)
      << "an unknown group";
}

TEST(DecodedBytes, AGroupHidesNothingBehindIt) {
  EXPECT_GT(Decoded("\xfb\x3e\xfc\x3e" + Repeat(std::string("\x0a\x00", 2), 1'000)), 16'000);
}

TEST(DecodedBytes, InvalidBytesEndTheCount) {
  for (const std::string bytes : {"\x0a", "\x0a\x7f", "\x08", "\xff\xff\xff\xff\xff\xff", "\x0c"}) {
    EXPECT_LE(Decoded(bytes), Decoded("") + 1'000);
  }
}

TEST(ParseMessage, RefusesWhatWouldTakeTooMuchMemory) {
  grpc::ByteBuffer bytes = ToByteBuffer(Repeat(std::string("\x0a\x00", 2), 2'000'000));
  ScoreRequest request;
  const absl::Status status = ParseMessage(bytes, request);
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  EXPECT_EQ(request.sequences_size(), 0);
}

}  // namespace
}  // namespace tandem::rpc
