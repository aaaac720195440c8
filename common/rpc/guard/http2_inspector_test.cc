#include "common/rpc/guard/http2_inspector.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "common/rpc/testing/http2_frames.h"

namespace tandem::rpc {
namespace {

using testing::HasSubstr;

// A connection whose client has said its preface and settings.
class Http2InspectorTest : public testing::Test {
 protected:
  Http2InspectorTest() { Client(kHttp2Preface + Frame(kSettingsFrame, 0, 0)); }
  void Client(const std::string& bytes) { EXPECT_TRUE(inspector_.OnClientBytes(bytes).ok()); }

  Http2Inspector inspector_;
};

TEST_F(Http2InspectorTest, AStreamIsOpenUntilEitherSideEndsIt) {
  Client(Frame(kHeadersFrame, 0, 1) + Frame(kHeadersFrame, 0, 3) + Frame(kHeadersFrame, 0, 5));
  EXPECT_EQ(inspector_.open_streams(), 3);
  Client(Frame(kDataFrame, kEndStreamFlag, 1, Message(2, 2)));
  EXPECT_EQ(inspector_.open_streams(), 3) << "the server has yet to answer";
  inspector_.OnServerBytes(Frame(kHeadersFrame, 0, 1) + Frame(kHeadersFrame, kEndStreamFlag, 1));
  EXPECT_EQ(inspector_.open_streams(), 2);
  Client(Frame(kResetFrame, 0, 3, Bytes(8, 4)));
  inspector_.OnServerBytes(Frame(kResetFrame, 0, 5, Bytes(0, 4)));
  EXPECT_EQ(inspector_.open_streams(), 0);
}

TEST_F(Http2InspectorTest, ResetsOfOpenStreamsAreCounted) {
  Client(Frame(kHeadersFrame, 0, 1) + Frame(kResetFrame, 0, 1, Bytes(8, 4)));
  EXPECT_EQ(inspector_.resets(), 1);
  Client(Frame(kHeadersFrame, 0, 3));
  inspector_.OnServerBytes(Frame(kHeadersFrame, kEndStreamFlag, 3));
  Client(Frame(kResetFrame, 0, 3, Bytes(8, 4)));
  EXPECT_EQ(inspector_.resets(), 1) << "the call was over";
}

TEST_F(Http2InspectorTest, ResetsThatTheClientProvokesAreCounted) {
  Client(Frame(kHeadersFrame, 0, 1) + Frame(kHeadersFrame, 0, 3));
  inspector_.OnServerBytes(Frame(kResetFrame, 0, 1, Bytes(3, 4)));
  EXPECT_EQ(inspector_.resets(), 1);
  inspector_.OnServerBytes(Frame(kResetFrame, 0, 3, Bytes(0, 4)));
  EXPECT_EQ(inspector_.resets(), 1) << "a call that the server ends early has NO_ERROR";
}

TEST_F(Http2InspectorTest, UnfinishedBytesAreThoseOfIncompleteMessages) {
  Client(Frame(kHeadersFrame, 0, 1) + Frame(kHeadersFrame, 0, 3));
  Client(Frame(kDataFrame, 0, 1, Message(10, 10) + Message(10, 4)));
  EXPECT_EQ(inspector_.unfinished_bytes(), 9);
  Client(Frame(kDataFrame, 0, 3, Message(1000, 995)));
  EXPECT_EQ(inspector_.unfinished_bytes(), 1009);
  Client(Frame(kDataFrame, 0, 1, std::string(6, 'x')));
  EXPECT_EQ(inspector_.unfinished_bytes(), 1000);
  Client(Frame(kResetFrame, 0, 3, Bytes(8, 4)));
  EXPECT_EQ(inspector_.unfinished_bytes(), 0);
}

TEST_F(Http2InspectorTest, PaddingIsNoMessage) {
  Client(Frame(kHeadersFrame, 0, 1));
  Client(Frame(kDataFrame, kPaddedFlag, 1, Bytes(20, 1) + Message(10, 4) + std::string(20, '\0')));
  EXPECT_EQ(inspector_.unfinished_bytes(), 9);
}

TEST_F(Http2InspectorTest, ReadsMayEndAnywhere) {
  const std::string bytes = Frame(kHeadersFrame, 0, 1) +
                            Frame(kDataFrame, kPaddedFlag, 1, Bytes(3, 1) + Message(9, 4) + "abc") +
                            Frame(kHeadersFrame, 0, 3) + Frame(kResetFrame, 0, 3, Bytes(8, 4));
  for (const char byte : bytes) Client(std::string(1, byte));
  EXPECT_EQ(inspector_.unfinished_bytes(), 9);
  EXPECT_EQ(inspector_.open_streams(), 1);
  EXPECT_EQ(inspector_.resets(), 1);
}

TEST_F(Http2InspectorTest, AStreamThatEndsInsideAMessageIsAnError) {
  Client(Frame(kHeadersFrame, 0, 1) + Frame(kHeadersFrame, 0, 3));
  Client(Frame(kDataFrame, kEndStreamFlag, 1, Message(4, 4)));
  const absl::Status status =
      inspector_.OnClientBytes(Frame(kDataFrame, kEndStreamFlag, 3, Message(4, 3)));
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("stream 3 ends inside a message"));
}

TEST_F(Http2InspectorTest, AnEmptyFrameMayEndAStream) {
  Client(Frame(kHeadersFrame, 0, 1) + Frame(kDataFrame, 0, 1, Message(4, 4)));
  Client(Frame(kDataFrame, kEndStreamFlag, 1));
  Client(Frame(kHeadersFrame, 0, 3) + Frame(kDataFrame, 0, 3, Message(4, 3)));
  EXPECT_FALSE(inspector_.OnClientBytes(Frame(kDataFrame, kEndStreamFlag, 3)).ok());
}

TEST_F(Http2InspectorTest, HeadersThatAreTooLongAreAnError) {
  const std::string part(15 << 10, 'h');
  Client(Frame(kHeadersFrame, 0, 1, part));
  for (int i = 0; i < 3; ++i) Client(Frame(kContinuationFrame, 0, 1, part));
  Client(Frame(kContinuationFrame, kEndHeadersFlag, 1, "end"));
  // The next block starts anew.
  Client(Frame(kHeadersFrame, 0, 3, part));
  for (int i = 0; i < 3; ++i) Client(Frame(kContinuationFrame, 0, 3, part));
  const absl::Status status = inspector_.OnClientBytes(Frame(kContinuationFrame, 0, 3, part));
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("the headers of stream 3"));
}

TEST_F(Http2InspectorTest, FramesThatAskForAnAnswerAreCounted) {
  EXPECT_EQ(inspector_.control_frames(), 1);  // the settings at the start
  Client(Frame(kPingFrame, 0, 0, Bytes(0, 8)) + Frame(kSettingsFrame, 0, 0));
  Client(Frame(kPingFrame, kAckFlag, 0, Bytes(0, 8)) + Frame(kSettingsFrame, kAckFlag, 0));
  EXPECT_EQ(inspector_.control_frames(), 3);
}

TEST(Http2InspectorStart, AnotherProtocolIsAnError) {
  Http2Inspector inspector;
  EXPECT_TRUE(inspector.OnClientBytes("PRI").ok());
  EXPECT_FALSE(inspector.OnClientBytes(" / HTTP/1.1\r\n").ok());
}

}  // namespace
}  // namespace tandem::rpc
