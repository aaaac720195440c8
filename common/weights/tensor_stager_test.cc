#include "common/weights/tensor_stager.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <future>
#include <memory>
#include <string>
#include <thread>

#include "absl/functional/function_ref.h"
#include "common/base/files/file_descriptor.h"
#include "common/base/files/shared_file.h"
#include "common/weights/testing/told_weights.h"

namespace tandem {
namespace {

using ::testing::ElementsAre;

// Tensors of 8, 4 and 8 bytes.
const std::vector<WeightSpec> kTensors = {
    {.name = "a", .shape = {2}}, {.name = "b", .shape = {1}}, {.name = "c", .shape = {2}}};
constexpr char kStream[] = "aaaaaaaabbbbcccccccc";
constexpr int kBytes = 20;

void Write(TensorStager& stager, int begin, int end) {
  stager.Write(
      {reinterpret_cast<const std::byte*>(kStream) + begin, static_cast<size_t>(end - begin)});
}

std::string Text(const WeightSpec& spec, const TensorBytes& bytes) {
  return {reinterpret_cast<const char*>(bytes.get()), static_cast<size_t>(spec.bytes())};
}

// Fails unless the tensors come whole and in order, on another thread, when `write` gives the
// stager the bytes in chunks of any size.
void ExpectTensors(absl::FunctionRef<void(TensorStager& stager, int chunk)> write) {
  const std::thread::id writer = std::this_thread::get_id();
  for (int chunk = 1; chunk <= kBytes; ++chunk) {
    std::vector<std::string> taken;
    TensorStager stager(kTensors, [&](const WeightSpec& spec, TensorBytes bytes) {
      taken.push_back(Text(spec, bytes));
      EXPECT_NE(std::this_thread::get_id(), writer);
      return absl::OkStatus();
    });
    write(stager, chunk);
    EXPECT_TRUE(stager.Finish({}).ok());
    EXPECT_THAT(taken, ElementsAre("aaaaaaaa", "bbbb", "cccccccc"));
  }
}

TEST(TensorStagerTest, TensorsComeWholeAndInOrderOnAnotherThread) {
  ExpectTensors([](TensorStager& stager, int chunk) {
    for (int i = 0; i < kBytes; i += chunk) Write(stager, i, std::min(i + chunk, kBytes));
  });
}

TEST(TensorStagerTest, BytesOfAFileAreReadWhenTheirTensorIsTaken) {
  const FileDescriptor file = FileDescriptor::CreateUnnamed(testing::TempDir()).value();
  ASSERT_TRUE(file.WriteAll(kStream).ok());
  ExpectTensors([&](TensorStager& stager, int chunk) {
    for (int i = 0, turn = 0; i < kBytes; i += chunk, ++turn) {
      const int end = std::min(i + chunk, kBytes);
      // A stream that is taken up again may bring the bytes the other way.
      if (turn % 3 == 2) {
        Write(stager, i, end);
      } else {
        stager.WriteFrom({OpenShared(*Share(file)).value(), i, end - i});
      }
    }
  });
}

TEST(TensorStagerTest, AFileThatIsTooShortEndsTheUpdate) {
  const FileDescriptor file = FileDescriptor::CreateUnnamed(testing::TempDir()).value();
  ASSERT_TRUE(file.WriteAll("aaaaaaaabb").ok());
  int taken = 0;
  TensorStager stager(kTensors, [&](const WeightSpec&, TensorBytes) {
    ++taken;
    return absl::OkStatus();
  });
  stager.WriteFrom({OpenShared(*Share(file)).value(), 0, kBytes});
  EXPECT_EQ(stager.Finish({}).code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(taken, 1);
}

// A stream that broke may bring the rest of a tensor in another way.
TEST(TensorStagerTest, ATensorThatIsAllOnAGpuIsTakenThere) {
  const std::string stream = kStream;
  const auto memory = std::make_shared<const FakeGpuMemory>(stream);
  std::vector<std::string> taken, on_gpu;
  TensorStager stager(
      kTensors,
      [&](const WeightSpec& spec, TensorBytes bytes) {
        taken.push_back(Text(spec, bytes));
        return absl::OkStatus();
      },
      [&](const WeightSpec& spec, absl::Span<const SharedRange> ranges) {
        EXPECT_EQ(ranges.size(), 1U);
        on_gpu.push_back(spec.name + std::to_string(ranges[0].offset));
        return absl::OkStatus();
      });
  stager.WriteFrom({memory, 0, 5});
  stager.WriteFrom({memory, 5, 4});  // the rest of "a", and of "b" a byte
  Write(stager, 9, 12);
  stager.WriteFrom({memory, 12, 8});
  EXPECT_TRUE(stager.Finish({}).ok());
  EXPECT_THAT(on_gpu, ElementsAre("a0", "c12"));
  EXPECT_THAT(taken, ElementsAre("bbbb"));
}

// A tensor of three bfloat16 values ends within a word.
TEST(TensorStagerTest, TensorsOfSeveralTypesAreCutByTheirBytes) {
  const std::vector<WeightSpec> tensors = {{.name = "a", .shape = {2}},
                                           {.name = "b", .dtype = DType::kBFloat16, .shape = {3}},
                                           {.name = "c", .dtype = DType::kBFloat16, .shape = {3}}};
  std::vector<std::string> taken;
  TensorStager stager(tensors, [&](const WeightSpec& spec, TensorBytes bytes) {
    taken.push_back(Text(spec, bytes));
    return absl::OkStatus();
  });
  for (int i = 0; i < kBytes; i += 5) Write(stager, i, i + 5);
  EXPECT_TRUE(stager.Finish({}).ok());
  EXPECT_THAT(taken, ElementsAre("aaaaaaaa", "bbbbcc", "cccccc"));
}

// The stream goes on while a tensor is taken, as far as there is room.
TEST(TensorStagerTest, HoldsAtMostTwiceTheLargestTensor) {
  std::atomic<int> written = 0;
  std::promise<void> whole_room;
  int ended = 0;  // bytes of the tensors that were taken
  TensorStager stager(kTensors, [&](const WeightSpec& spec, TensorBytes) {
    if (ended == 0) {
      whole_room.get_future().wait();
      absl::SleepFor(absl::Milliseconds(20));  // in which a stager without a bound would go on
    }
    EXPECT_LE(written, ended + 16);
    ended += static_cast<int>(spec.bytes());
    return absl::OkStatus();
  });
  for (int i = 0; i < kBytes; ++i) {
    // There is room for the first two tensors while the first is taken; byte 12 starts the third.
    if (i == 12) whole_room.set_value();
    Write(stager, i, i + 1);
    ++written;
  }
  EXPECT_TRUE(stager.Finish({}).ok());
  EXPECT_EQ(ended, kBytes);
}

TEST(TensorStagerTest, TheFirstErrorEndsTheTaking) {
  std::vector<std::string> taken;
  TensorStager stager(kTensors, [&](const WeightSpec& spec, TensorBytes) -> absl::Status {
    taken.push_back(spec.name);
    if (spec.name == "b") return absl::InvalidArgumentError("no b");
    return absl::OkStatus();
  });
  Write(stager, 0, 12);
  EXPECT_EQ(stager.Finish({}).message(), "no b");
  Write(stager, 12, kBytes);
  EXPECT_EQ(stager.Finish({}).message(), "no b");
  EXPECT_THAT(taken, ElementsAre("a", "b"));
}

TEST(TensorStagerTest, AnExceptionIsAnError) {
  TensorStager stager(
      kTensors, [](const WeightSpec&, TensorBytes) -> absl::Status { throw std::bad_alloc(); });
  Write(stager, 0, kBytes);
  EXPECT_EQ(stager.Finish({}).code(), absl::StatusCode::kResourceExhausted);
}

// The error stays when the tensor that is being taken meanwhile is a good one.
TEST(TensorStagerTest, TooLittleMemoryIsAnError) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "the sanitizer ends a process that asks for so much memory";
#endif
  std::promise<void> begun, failed;
  TensorStager stager({{.name = "a", .shape = {1}}, {.name = "huge", .shape = {int64_t{1} << 50}}},
                      [&](const WeightSpec&, TensorBytes) {
                        begun.set_value();
                        failed.get_future().wait();
                        return absl::OkStatus();
                      });
  Write(stager, 0, 4);
  begun.get_future().wait();
  Write(stager, 4, 5);  // of "huge"
  failed.set_value();
  absl::SleepFor(absl::Milliseconds(20));  // in which "a" has been taken
  CallScope call;
  // Not reached: the packing thread has a low priority, and a loaded machine runs it late.
  call.deadline = SteadyTime::Now() + absl::Seconds(60);
  EXPECT_EQ(stager.Finish(call).code(), absl::StatusCode::kResourceExhausted);
}

TEST(TensorStagerTest, WhoHasGoneDoesNotWait) {
  std::promise<void> open;
  TensorStager stager(kTensors, [&](const WeightSpec& spec, TensorBytes) {
    if (spec.name == "c") open.get_future().wait();
    return absl::OkStatus();
  });
  Write(stager, 0, kBytes);
  CallScope late;
  late.deadline = SteadyTime();
  EXPECT_EQ(stager.Finish(late).code(), absl::StatusCode::kDeadlineExceeded);
  std::stop_source cancelled;
  CallScope call;
  call.cancellation = cancelled.get_token();
  std::thread canceller([&] { cancelled.request_stop(); });
  EXPECT_EQ(stager.Finish(call).code(), absl::StatusCode::kCancelled);
  canceller.join();
  open.set_value();
  EXPECT_TRUE(stager.Finish({}).ok());
}

TEST(TensorStagerTest, EndsInTheMiddleOfTheStream) {
  int taken = 0;
  {
    TensorStager stager(kTensors, [&](const WeightSpec&, TensorBytes) {
      ++taken;
      return absl::OkStatus();
    });
    Write(stager, 0, 15);
  }
  EXPECT_LE(taken, 2);
}

}  // namespace
}  // namespace tandem
