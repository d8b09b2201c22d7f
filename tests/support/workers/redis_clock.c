// Preloaded into redis-server: its clock is the two numbers of the file $REDIS_CLOCK, both in microseconds. Where
// the first is 0 it is the machine's plus the second; else it is the first, time stands still, and the hash seed
// is constant. The monotonic clock, by which it only schedules its own upkeep, stays the machine's. libfaketime
// is no choice for Debian's: its jemalloc asks for the time before libfaketime can answer, and it ends.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>

static const volatile int64_t *given(void) {
  static const volatile int64_t *shared;
  if (!shared) shared = mmap(NULL, 16, PROT_READ, MAP_SHARED, open(getenv("REDIS_CLOCK"), O_RDONLY), 0);
  return shared;
}

static int64_t now_us(void) {
  struct timespec machine;
  if (given()[0]) return given()[0];
  clock_gettime(CLOCK_REALTIME, &machine);
  return machine.tv_sec * 1000000 + machine.tv_nsec / 1000 + given()[1];
}

int gettimeofday(struct timeval *restrict tv, void *restrict zone) {
  int64_t us = now_us();
  (void)zone;
  tv->tv_sec = us / 1000000;
  tv->tv_usec = us % 1000000;
  return 0;
}

time_t time(time_t *out) {
  time_t seconds = now_us() / 1000000;
  if (out) *out = seconds;
  return seconds;
}

static FILE *opened(const char *function, const char *path, const char *mode) {
  FILE *(*real)(const char *, const char *);
  *(void **)&real = dlsym(RTLD_NEXT, function);
  return real(given()[0] && !strcmp(path, "/dev/urandom") ? "/dev/zero" : path, mode);
}

FILE *fopen(const char *path, const char *mode) { return opened("fopen", path, mode); }

FILE *fopen64(const char *path, const char *mode) { return opened("fopen64", path, mode); }
