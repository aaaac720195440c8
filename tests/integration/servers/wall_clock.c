// A wall clock that a test can set, for the processes that load this library before libc:
// LD_PRELOAD=wall_clock.so WALL_CLOCK=file. The file holds the seconds (int64) to add.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile const int64_t* added;

__attribute__((constructor)) static void MapFile(void) {
  const char* path = getenv("WALL_CLOCK");
  const int fd = path == NULL ? -1 : open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return;
  void* map = mmap(NULL, sizeof(*added), PROT_READ, MAP_SHARED, fd, 0);
  if (map != MAP_FAILED) added = map;
  close(fd);
}

static int64_t Added(void) { return added == NULL ? 0 : *added; }

int clock_gettime(clockid_t clock, struct timespec* now) {
  static int (*original)(clockid_t, struct timespec*);
  if (original == NULL) original = dlsym(RTLD_NEXT, "clock_gettime");
  const int result = original(clock, now);
  if (result == 0 && clock == CLOCK_REALTIME) now->tv_sec += Added();
  return result;
}

int gettimeofday(struct timeval* now, void* zone) {
  (void)zone;
  struct timespec time;
  const int result = clock_gettime(CLOCK_REALTIME, &time);
  now->tv_sec = time.tv_sec;
  now->tv_usec = time.tv_nsec / 1000;
  return result;
}

time_t time(time_t* out) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (out != NULL) *out = now.tv_sec;
  return now.tv_sec;
}

// Abseil waits so until a moment of the wall clock, which the kernel knows without what is added.
long syscall(long number, ...) {
  static long (*original)(long, ...);
  if (original == NULL) original = dlsym(RTLD_NEXT, "syscall");
  long a[6];
  va_list list;
  va_start(list, number);
  for (int i = 0; i < 6; ++i) a[i] = va_arg(list, long);
  va_end(list);
  struct timespec until;
  if (number == SYS_futex && (a[1] & FUTEX_CLOCK_REALTIME) != 0 && a[3] != 0) {
    until = *(const struct timespec*)a[3];
    until.tv_sec -= Added();
    a[3] = (long)&until;
  }
  return original(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}
