// Counts what a process asks of its GPU, without its help: CUDA_INJECTION64_PATH=gpuprof.so
// GPUPROF=out.jsonl program Every quarter of a second one line of JSON: seconds since the epoch and
// totals so far; at the end the kernels by time, and the seconds of NCCL's kernels, all of them and
// those beside which another kernel ran.
#include <cupti.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace {
std::mutex mutex;
struct Totals {
  uint64_t kernels = 0, kernel_ns = 0, to_device = 0, to_device_bytes = 0, to_host = 0,
           to_host_bytes = 0, other_copies = 0, copy_ns = 0, fills = 0;
} totals;
std::map<std::string, std::pair<uint64_t, uint64_t>> by_name;
using Spans = std::vector<std::pair<uint64_t, uint64_t>>;  // begins and ends
Spans of_nccl, of_others;
std::atomic<uint64_t> syncs{0}, launches{0}, graph_launches{0}, api_calls{0};
FILE* out = nullptr;

void CUPTIAPI Request(uint8_t** buffer, size_t* size, size_t* most) {
  *size = 8 << 20;
  *buffer = static_cast<uint8_t*>(aligned_alloc(8, *size));
  *most = 0;
}

void CUPTIAPI Complete(CUcontext, uint32_t, uint8_t* buffer, size_t, size_t valid) {
  std::lock_guard lock(mutex);
  CUpti_Activity* record = nullptr;
  while (cuptiActivityGetNextRecord(buffer, valid, &record) == CUPTI_SUCCESS) {
    if (record->kind == CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL ||
        record->kind == CUPTI_ACTIVITY_KIND_KERNEL) {
      const auto* k = reinterpret_cast<CUpti_ActivityKernel9*>(record);
      ++totals.kernels;
      totals.kernel_ns += k->end - k->start;
      auto& [count, ns] = by_name[k->name ? k->name : "?"];
      ++count;
      ns += k->end - k->start;
      const bool is_nccl = k->name && std::strstr(k->name, "nccl");
      (is_nccl ? of_nccl : of_others).emplace_back(k->start, k->end);
    } else if (record->kind == CUPTI_ACTIVITY_KIND_MEMCPY) {
      const auto* m = reinterpret_cast<CUpti_ActivityMemcpy5*>(record);
      totals.copy_ns += m->end - m->start;
      if (m->copyKind == CUPTI_ACTIVITY_MEMCPY_KIND_HTOD) {
        ++totals.to_device;
        totals.to_device_bytes += m->bytes;
      } else if (m->copyKind == CUPTI_ACTIVITY_MEMCPY_KIND_DTOH) {
        ++totals.to_host;
        totals.to_host_bytes += m->bytes;
      } else
        ++totals.other_copies;
    } else if (record->kind == CUPTI_ACTIVITY_KIND_MEMSET)
      ++totals.fills;
  }
  free(buffer);
}

void CUPTIAPI Called(void*, CUpti_CallbackDomain domain, CUpti_CallbackId id, const void* data) {
  const auto* info = static_cast<const CUpti_CallbackData*>(data);
  if (info->callbackSite != CUPTI_API_ENTER || domain != CUPTI_CB_DOMAIN_DRIVER_API) return;
  ++api_calls;
  const std::string name = info->functionName;
  if (name.rfind("cuLaunchKernel", 0) == 0)
    ++launches;
  else if (name.rfind("cuGraphLaunch", 0) == 0)
    ++graph_launches;
  else if (name.find("Synchronize") != std::string::npos)
    ++syncs;
}

double Now() {
  timespec t;
  clock_gettime(CLOCK_REALTIME, &t);
  return t.tv_sec + 1e-9 * t.tv_nsec;
}

void Line() {
  std::lock_guard lock(mutex);
  std::fprintf(out,
               "{\"t\": %.3f, \"kernels\": %lu, \"kernel_s\": %.6f, \"launches\": %lu, \"graphs\": "
               "%lu, \"syncs\": %lu, \"h2d\": %lu, \"h2d_bytes\": %lu, \"d2h\": %lu, "
               "\"d2h_bytes\": %lu, \"d2d\": %lu, \"copy_s\": %.6f, \"fills\": %lu}\n",
               Now(), totals.kernels, totals.kernel_ns * 1e-9, launches.load(),
               graph_launches.load(), syncs.load(), totals.to_device, totals.to_device_bytes,
               totals.to_host, totals.to_host_bytes, totals.other_copies, totals.copy_ns * 1e-9,
               totals.fills);
  std::fflush(out);
}

// Returns the spans in order, those that overlap as one.
Spans Union(Spans spans) {
  std::sort(spans.begin(), spans.end());
  Spans merged;
  for (const auto& [begin, end] : spans) {
    if (merged.empty() || merged.back().second < begin)
      merged.emplace_back(begin, end);
    else
      merged.back().second = std::max(merged.back().second, end);
  }
  return merged;
}

// Returns the length of what two unions have in common.
uint64_t Common(const Spans& a, const Spans& b) {
  uint64_t length = 0;
  for (size_t i = 0, j = 0; i < a.size() && j < b.size();) {
    const uint64_t begin = std::max(a[i].first, b[j].first);
    const uint64_t end = std::min(a[i].second, b[j].second);
    if (begin < end) length += end - begin;
    a[i].second < b[j].second ? ++i : ++j;
  }
  return length;
}

void End() {
  cuptiActivityFlushAll(1);
  Line();
  std::lock_guard lock(mutex);
  std::vector<std::pair<std::string, std::pair<uint64_t, uint64_t>>> rows(by_name.begin(),
                                                                          by_name.end());
  std::sort(rows.begin(), rows.end(),
            [](auto& a, auto& b) { return a.second.second > b.second.second; });
  for (size_t i = 0; i < std::min<size_t>(rows.size(), 24); ++i)
    std::fprintf(out, "{\"kernel\": \"%.150s\", \"count\": %lu, \"seconds\": %.6f}\n",
                 rows[i].first.c_str(), rows[i].second.first, rows[i].second.second * 1e-9);
  const Spans nccl = Union(of_nccl);
  std::fprintf(out, "{\"nccl_s\": %.6f, \"beside_s\": %.6f}\n", Common(nccl, nccl) * 1e-9,
               Common(nccl, Union(of_others)) * 1e-9);
  std::fflush(out);
}
}  // namespace

extern "C" int InitializeInjection() {
  const char* path = getenv("GPUPROF");
  out = std::fopen(
      (std::string(path ? path : "/tmp/gpuprof") + "." + std::to_string(getpid())).c_str(), "w");
  if (!out) return 1;
  CUpti_SubscriberHandle subscriber;
  cuptiSubscribe(&subscriber, Called, nullptr);
  cuptiEnableDomain(1, subscriber, CUPTI_CB_DOMAIN_DRIVER_API);
  cuptiActivityRegisterCallbacks(Request, Complete);
  cuptiActivityEnable(CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL);
  cuptiActivityEnable(CUPTI_ACTIVITY_KIND_MEMCPY);
  cuptiActivityEnable(CUPTI_ACTIVITY_KIND_MEMSET);
  std::thread([] {
    for (;;) {
      timespec t{0, 250000000};
      nanosleep(&t, nullptr);
      cuptiActivityFlushAll(0);
      Line();
    }
  }).detach();
  atexit(End);
  return 1;
}
