/* Preloaded into redis-server: its clock is the eight bytes of a file, microseconds since 1970, and its hash
   seed is constant. The monotonic clock, by which it only schedules its own upkeep, stays the machine's. */
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

static volatile int64_t *shared;

static int64_t now_us(void) {
    if (!shared) {
        int file = open(getenv("SIMULATED_CLOCK"), O_RDONLY);
        shared = mmap(NULL, 8, PROT_READ, MAP_SHARED, file, 0);
    }
    return *shared;
}

int gettimeofday(struct timeval *restrict tv, void *restrict tz) {
    int64_t us = now_us();
    (void)tz;
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
    return real(strcmp(path, "/dev/urandom") ? path : "/dev/zero", mode);
}

FILE *fopen(const char *path, const char *mode) { return opened("fopen", path, mode); }

FILE *fopen64(const char *path, const char *mode) { return opened("fopen64", path, mode); }
