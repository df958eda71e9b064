/* Records what a process does to the files below one folder, and makes chosen calls fail.

   Loaded with LD_PRELOAD. The environment names
     FASTNESS_STORAGE_ROOT    the folder, absolute and without symbolic links
     FASTNESS_STORAGE_MARKS   a file outside it: what is written to it becomes a mark in the trace
     FASTNESS_STORAGE_TRACE   the file that receives the trace; without it nothing is recorded

   `storage_fail` and `storage_calls` are called by the program itself, through ctypes.

   One lock is held during each call and while it is recorded, so the trace has the order in which the calls took
   effect: a sync covers exactly the writes before it. Only calls that succeed are recorded. Real calls are made with
   syscall(), and the path of a descriptor is read from /proc, so duplicated descriptors need no care. Writes through
   memory maps and stdio are not seen. */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

struct record {
    uint64_t kind, inode, offset;
    uint32_t path_bytes, target_bytes, data_bytes, reserved;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static const char *root, *marks;
static int trace = -1;
static long calls, fail_at = -1, fail_times;
static int fail_error, short_written = -1;

__attribute__((constructor)) static void start(void)
{
    const char *path = getenv("FASTNESS_STORAGE_TRACE");
    root = getenv("FASTNESS_STORAGE_ROOT");
    marks = getenv("FASTNESS_STORAGE_MARKS");
    if (path)
        trace = syscall(SYS_openat, AT_FDCWD, path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
}

/* Let `times` calls fail with `error`, after `at` more calls; a negative `at` ends it. Restarts the count of calls. */
void storage_fail(long at, int error, long times)
{
    pthread_mutex_lock(&lock);
    calls = 0, fail_at = at, fail_error = error, fail_times = times, short_written = -1;
    pthread_mutex_unlock(&lock);
}

/* How many calls that can fail were made since the last storage_fail. */
long storage_calls(void)
{
    return calls;
}

static void record(int kind, uint64_t inode, uint64_t offset, const char *path, const char *target, const void *data,
                   size_t size)
{
    if (trace < 0)
        return;
    int saved = errno;
    struct record head = {kind, inode, offset, strlen(path), strlen(target), size, 0};
    struct iovec parts[] = {{&head, sizeof head},
                            {(void *)path, head.path_bytes},
                            {(void *)target, head.target_bytes},
                            {(void *)data, size}};
    if (syscall(SYS_writev, trace, parts, 4) != (long)(sizeof head + head.path_bytes + head.target_bytes + size))
        abort(); /* A trace with a hole would prove nothing. */
    errno = saved;
}

static int is_inside(const char *path)
{
    size_t length = root ? strlen(root) : 0;
    return length && !strncmp(path, root, length) && (path[length] == '/' || !path[length]);
}

/* The path of an open file in `path`; false if it is neither below the root nor the file of marks. */
static int find_path(int fd, char *path)
{
    char link[64];
    int saved = errno;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, PATH_MAX - 1);
    errno = saved;
    if (length < 0)
        return 0;
    path[length] = 0;
    return is_inside(path) || (marks && !strcmp(path, marks));
}

static void make_absolute(int folder, const char *path, char *absolute)
{
    char base[PATH_MAX] = "";
    if (path[0] != '/' && folder == AT_FDCWD)
        (void)!getcwd(base, sizeof base);
    else if (path[0] != '/')
        find_path(folder, base);
    snprintf(absolute, PATH_MAX, "%s%s%s", base, path[0] == '/' ? "" : "/", path);
    size_t length = strlen(absolute);
    while (length > 1 && absolute[length - 1] == '/')
        absolute[--length] = 0;
}

static uint64_t inode_of(int fd)
{
    struct stat status;
    return fstat(fd, &status) ? 0 : status.st_ino;
}

/* Whether this call shall fail; counts it. The lock is held. */
static int fails(void)
{
    long call = calls++;
    if (fail_at < 0 || call < fail_at || call - fail_at >= fail_times)
        return 0;
    errno = fail_error;
    return 1;
}

static int open_file(int folder, const char *path, int flags, mode_t mode)
{
    char absolute[PATH_MAX];
    make_absolute(folder, path, absolute);
    if (!is_inside(absolute))
        return syscall(SYS_openat, folder, path, flags, mode);
    pthread_mutex_lock(&lock);
    int existed = !faccessat(folder, path, F_OK, 0), fd = -1;
    if (!fails())
        fd = syscall(SYS_openat, folder, path, flags, mode);
    if (fd >= 0 && !existed)
        record('C', inode_of(fd), 0, absolute, "", "", 0);
    else if (fd >= 0 && flags & O_TRUNC && (flags & O_ACCMODE) != O_RDONLY)
        record('T', inode_of(fd), 0, absolute, "", "", 0);
    pthread_mutex_unlock(&lock);
    return fd;
}

int open(const char *path, int flags, ...)
{
    va_list more;
    va_start(more, flags);
    mode_t mode = flags & (O_CREAT | __O_TMPFILE) ? va_arg(more, mode_t) : 0;
    va_end(more);
    return open_file(AT_FDCWD, path, flags, mode);
}

int openat(int folder, const char *path, int flags, ...)
{
    va_list more;
    va_start(more, flags);
    mode_t mode = flags & (O_CREAT | __O_TMPFILE) ? va_arg(more, mode_t) : 0;
    va_end(more);
    return open_file(folder, path, flags, mode);
}

int open64(const char *path, int flags, ...) __attribute__((alias("open")));
int openat64(int folder, const char *path, int flags, ...) __attribute__((alias("openat")));

int creat(const char *path, mode_t mode)
{
    return open_file(AT_FDCWD, path, O_CREAT | O_WRONLY | O_TRUNC, mode);
}

int close(int fd)
{
    char path[PATH_MAX];
    if (!find_path(fd, path) || !is_inside(path))
        return syscall(SYS_close, fd);
    pthread_mutex_lock(&lock);
    int result = syscall(SYS_close, fd); /* Linux releases the descriptor also where close fails. */
    if (fails())
        result = -1;
    pthread_mutex_unlock(&lock);
    return result;
}

/* Write at `offset`, or at the file's position if it is negative. */
static ssize_t write_at(int fd, const void *data, size_t size, off_t offset)
{
    char path[PATH_MAX];
    int at_position = offset < 0;
    if (!find_path(fd, path))
        return at_position ? syscall(SYS_write, fd, data, size) : syscall(SYS_pwrite64, fd, data, size, offset);
    pthread_mutex_lock(&lock);
    ssize_t written = -1;
    if (!is_inside(path)) {
        record('K', 0, 0, "", "", data, size);
        written = size;
    } else {
        struct stat status = {0};
        fstat(fd, &status);
        if (fcntl(fd, F_GETFL) & O_APPEND)
            offset = status.st_size;
        else if (at_position)
            offset = lseek(fd, 0, SEEK_CUR);
        int failing = short_written == fd;
        if (failing)
            errno = ENOSPC, short_written = -1;
        else if ((failing = fails()) && errno == ENOSPC && size > 1) {
            /* A disk that becomes full first accepts a part, then nothing. */
            failing = 0, size /= 2, short_written = fd;
        }
        if (!failing)
            written = at_position ? syscall(SYS_write, fd, data, size) : syscall(SYS_pwrite64, fd, data, size, offset);
        if (written > 0)
            record('W', status.st_ino, offset, path, "", data, written);
    }
    pthread_mutex_unlock(&lock);
    return written;
}

ssize_t write(int fd, const void *data, size_t size)
{
    return write_at(fd, data, size, -1);
}

ssize_t pwrite(int fd, const void *data, size_t size, off_t offset)
{
    return write_at(fd, data, size, offset);
}

ssize_t pwrite64(int fd, const void *data, size_t size, off_t offset) __attribute__((alias("pwrite")));

ssize_t writev(int fd, const struct iovec *parts, int count)
{
    char path[PATH_MAX];
    if (!find_path(fd, path))
        return syscall(SYS_writev, fd, parts, count);
    ssize_t total = 0; /* Like a full disk, a failure may end it after some of the parts. */
    for (int part = 0; part < count; part++) {
        ssize_t written = write_at(fd, parts[part].iov_base, parts[part].iov_len, -1);
        if (written < 0)
            return total ? total : -1;
        total += written;
        if ((size_t)written < parts[part].iov_len)
            break;
    }
    return total;
}

static ssize_t read_at(int fd, void *data, size_t size, off_t offset)
{
    char path[PATH_MAX];
    if (find_path(fd, path) && is_inside(path)) {
        pthread_mutex_lock(&lock);
        int failing = fails();
        pthread_mutex_unlock(&lock);
        if (failing)
            return -1;
    }
    return offset < 0 ? syscall(SYS_read, fd, data, size) : syscall(SYS_pread64, fd, data, size, offset);
}

ssize_t read(int fd, void *data, size_t size)
{
    return read_at(fd, data, size, -1);
}

ssize_t pread(int fd, void *data, size_t size, off_t offset)
{
    return read_at(fd, data, size, offset);
}

ssize_t pread64(int fd, void *data, size_t size, off_t offset) __attribute__((alias("pread")));

/* A call on an open file, and its record. */
static int on_file(int kind, int fd, long number, long argument)
{
    char path[PATH_MAX];
    if (!find_path(fd, path))
        return syscall(number, fd, argument);
    pthread_mutex_lock(&lock);
    int result = fails() ? -1 : syscall(number, fd, argument);
    if (!result)
        record(kind, inode_of(fd), argument, path, "", "", 0);
    pthread_mutex_unlock(&lock);
    return result;
}

int fsync(int fd)
{
    return on_file('S', fd, SYS_fsync, 0);
}

int fdatasync(int fd)
{
    return on_file('S', fd, SYS_fdatasync, 0);
}

int ftruncate(int fd, off_t length)
{
    return on_file('T', fd, SYS_ftruncate, length);
}

int ftruncate64(int fd, off_t length) __attribute__((alias("ftruncate")));

int sync_file_range(int fd, off_t offset, off_t size, unsigned flags)
{
    /* It makes nothing durable: neither the size nor the disk's own cache. So there is no record. */
    return syscall(SYS_sync_file_range, fd, offset, size, flags);
}

int fallocate(int fd, int mode, off_t offset, off_t size)
{
    (void)fd, (void)mode, (void)offset, (void)size;
    errno = EOPNOTSUPP; /* Programs do without it, and images need no model of it. */
    return -1;
}

int fallocate64(int fd, int mode, off_t offset, off_t size) __attribute__((alias("fallocate")));

/* A change of names. `target` is empty, or the new name. */
static int on_name(int kind, int folder, const char *path, int target_folder, const char *target, long number,
                   long argument)
{
    char from[PATH_MAX], to[PATH_MAX] = "";
    make_absolute(folder, path, from);
    if (target)
        make_absolute(target_folder, target, to);
    int inside = is_inside(from) || is_inside(to), result = -1;
    if (inside)
        pthread_mutex_lock(&lock);
    if (!inside || !fails())
        result = target ? syscall(number, folder, path, target_folder, target, argument)
                        : syscall(number, folder, path, argument);
    if (inside && !result) {
        struct stat status = {0};
        stat(from, &status);
        record(kind, status.st_ino, 0, from, to, "", 0);
    }
    if (inside)
        pthread_mutex_unlock(&lock);
    return result;
}

int renameat2(int folder, const char *path, int target_folder, const char *target, unsigned flags)
{
    return on_name('R', folder, path, target_folder, target, SYS_renameat2, flags);
}

int renameat(int folder, const char *path, int target_folder, const char *target)
{
    return renameat2(folder, path, target_folder, target, 0);
}

int rename(const char *path, const char *target)
{
    return renameat2(AT_FDCWD, path, AT_FDCWD, target, 0);
}

int linkat(int folder, const char *path, int target_folder, const char *target, int flags)
{
    return on_name('L', folder, path, target_folder, target, SYS_linkat, flags);
}

int link(const char *path, const char *target)
{
    return linkat(AT_FDCWD, path, AT_FDCWD, target, 0);
}

int unlinkat(int folder, const char *path, int flags)
{
    return on_name('U', folder, path, 0, NULL, SYS_unlinkat, flags);
}

int unlink(const char *path)
{
    return unlinkat(AT_FDCWD, path, 0);
}

int rmdir(const char *path)
{
    return unlinkat(AT_FDCWD, path, AT_REMOVEDIR);
}

int mkdirat(int folder, const char *path, mode_t mode)
{
    return on_name('M', folder, path, 0, NULL, SYS_mkdirat, mode);
}

int mkdir(const char *path, mode_t mode)
{
    return mkdirat(AT_FDCWD, path, mode);
}
