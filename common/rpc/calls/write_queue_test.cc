#include "common/rpc/calls/write_queue.h"

#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <vector>

#include "common/base/steady_time.h"
#include "common/rpc/calls/stream_message.h"
#include "common/rpc/testing/raw_call.h"

namespace tandem::rpc {
namespace {

class WriteQueueTest : public testing::Test {
 protected:
  static grpc::ByteBuffer Message(size_t bytes) { return ToByteBuffer(std::string(bytes, 'x')); }

  ByteBudget budget_{1000};
  int started_ = 0;
  std::optional<grpc::Status> finished_;
  WriteQueue<grpc::ByteBuffer> queue_{[this](const grpc::ByteBuffer*) { ++started_; },
                                      [this](grpc::Status status) { finished_ = status; }, budget_};
};

TEST_F(WriteQueueTest, WhatWaitsIsHeldUntilItIsWritten) {
  EXPECT_TRUE(queue_.Push(Message(400)));
  EXPECT_TRUE(queue_.Push(Message(300)));
  EXPECT_EQ(budget_.used_bytes(), 700);
  queue_.OnWriteDone(true);
  EXPECT_EQ(budget_.used_bytes(), 300);
  queue_.OnWriteDone(true);
  EXPECT_EQ(budget_.used_bytes(), 0);
  EXPECT_EQ(started_, 2);
}

// The reader that comes back after all learns why; what waited is given back at once.
TEST_F(WriteQueueTest, AReaderThatLeavesTooMuchLosesTheStream) {
  EXPECT_TRUE(queue_.Push(Message(400)));
  EXPECT_TRUE(queue_.Push(Message(300)));
  EXPECT_FALSE(queue_.Push(Message(301)));
  EXPECT_EQ(budget_.used_bytes(), 400) << "only what is being written";
  EXPECT_FALSE(queue_.Push(Message(1)));
  EXPECT_FALSE(finished_.has_value());
  queue_.OnWriteDone(true);
  ASSERT_TRUE(finished_.has_value());
  EXPECT_EQ(finished_->error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_EQ(budget_.used_bytes(), 0);
}

TEST_F(WriteQueueTest, AFailedWriteGivesEverythingBack) {
  EXPECT_TRUE(queue_.Push(Message(400)));
  EXPECT_TRUE(queue_.Push(Message(300)));
  queue_.OnWriteDone(false);
  EXPECT_EQ(budget_.used_bytes(), 0);
  EXPECT_TRUE(finished_.has_value());
}

// Joins messages up to 400 bytes, and notes the sizes of those that it was asked to join.
TEST_F(WriteQueueTest, AMessageIsComparedWithTheLastOfItsKeyAlone) {
  std::vector<size_t> asked;
  const auto merge = [&](grpc::ByteBuffer& waiting, const grpc::ByteBuffer& message) {
    asked.push_back(waiting.Length());
    if (waiting.Length() + message.Length() > 400) return false;
    waiting = Message(waiting.Length() + message.Length());
    return true;
  };
  EXPECT_TRUE(queue_.Push(Message(1), "a", merge)) << "it is written at once";
  EXPECT_TRUE(queue_.Push(Message(300), "a", merge));
  EXPECT_TRUE(queue_.Push(Message(10), "b", merge));
  EXPECT_TRUE(queue_.Push(Message(11)));
  EXPECT_TRUE(asked.empty());
  EXPECT_TRUE(queue_.Push(Message(20), "b", merge));
  EXPECT_TRUE(queue_.Push(Message(90), "a", merge));
  EXPECT_EQ(asked, (std::vector<size_t>{10, 300}));
  EXPECT_EQ(queue_.size(), 4u);
  EXPECT_TRUE(queue_.Push(Message(50), "a", merge)) << "a new one";
  EXPECT_TRUE(queue_.Push(Message(50), "a", merge));
  EXPECT_EQ(asked, (std::vector<size_t>{10, 300, 390, 50}));
  EXPECT_EQ(budget_.used_bytes(), 1 + 390 + 30 + 11 + 100);
  for (int i = 0; i < 4; ++i) queue_.OnWriteDone(true);
  EXPECT_TRUE(queue_.Push(Message(5), "a", merge)) << "the one before is on its way";
  EXPECT_EQ(asked.size(), 4u);
  EXPECT_EQ(budget_.used_bytes(), 105);
}

TEST_F(WriteQueueTest, AWriteWaitsFromItsStart) {
  EXPECT_EQ(queue_.waits_since(), SteadyTime::InfiniteFuture());
  queue_.Push(Message(1));
  EXPECT_LE(queue_.waits_since(), SteadyTime::Now());
  queue_.OnWriteDone(true);
  EXPECT_EQ(queue_.waits_since(), SteadyTime::InfiniteFuture());
  queue_.Finish(grpc::Status::OK);
  EXPECT_LE(queue_.waits_since(), SteadyTime::Now()) << "the end has to be taken, too";
}

}  // namespace
}  // namespace tandem::rpc
