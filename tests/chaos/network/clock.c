// Preloaded: the wall clock is that of the machine plus the seconds in the file $CLOCK_OFFSET. libfaketime is no
// choice for Debian's Redis: its jemalloc asks for the time before libfaketime can answer, and Redis ends.
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long offset_s(void) {
  static const long *shared = NULL;
  if (shared == NULL) {
    const char *path = environ == NULL ? NULL : getenv("CLOCK_OFFSET");
    int file = path == NULL ? -1 : open(path, O_RDONLY);
    if (file < 0) return 0;
    void *found = mmap(NULL, sizeof(long), PROT_READ, MAP_SHARED, file, 0);
    close(file);
    if (found == MAP_FAILED) return 0;
    shared = found;
  }
  return *shared;
}

int clock_gettime(clockid_t id, struct timespec *now) {
  int status = (int)syscall(SYS_clock_gettime, id, now);
  if (status == 0 && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) now->tv_sec += offset_s();
  return status;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
  struct timespec exact;
  (void)zone;
  if (clock_gettime(CLOCK_REALTIME, &exact) != 0) return -1;
  now->tv_sec = exact.tv_sec;
  now->tv_usec = exact.tv_nsec / 1000;
  return 0;
}

time_t time(time_t *out) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (out != NULL) *out = now.tv_sec;
  return now.tv_sec;
}
