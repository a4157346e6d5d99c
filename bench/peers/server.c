// A server so cheap that on two cores the load generator is the limit: HTTP/1.1, OpenAI completions and chat, streamed, one
// epoll thread. It counts prompt tokens exactly (ids of a list, else words), and writes down when it read each request.
//   gcc -O2 -o server server.c
//   ./server PORT [--gap-us N] [--ttft-us N] [--coalesce] [--stall-at-s N --stall-s N] [--log FILE]
// One answer chunk per token of max_tokens (max_completion_tokens). Without a gap each chunk is its own write, unless --coalesce.
// Log, one line a request: t_first_byte_ns,t_read_ns (CLOCK_MONOTONIC),prompt_tokens,chunks. GET /stats: requests so far.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

typedef struct conn {
  int fd, busy, chat, wants_usage, chunks, sent, slot;
  long prompt_tokens;
  int64_t first_ns, read_ns, due_ns;
  char *in, *out;
  size_t in_len, in_cap, out_len, out_off, out_cap;
} conn;

static volatile sig_atomic_t stopped;
static int poller, coalesce, timed_count, timed_cap;
static int64_t gap_ns, ttft_ns;
static long requests;
static conn **timed;  // those that owe a chunk at some time
static FILE *record;

static void on_signal(int number) { (void)number; stopped = 1; }
static int64_t now(void) { struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec * 1000000000LL + t.tv_nsec; }

static void put(conn *c, const char *bytes, size_t count) {
  if (c->out_len + count > c->out_cap) c->out = realloc(c->out, c->out_cap = 2 * (c->out_len + count) + 4096);
  memcpy(c->out + c->out_len, bytes, count);
  c->out_len += count;
}
static void event(conn *c, const char *text, int length) {  // one SSE event, one HTTP chunk
  char head[16];
  put(c, head, sprintf(head, "%x\r\n", length));
  put(c, text, length);
  put(c, "\r\n", 2);
}
static void flush(conn *c) {
  int waited = c->out_off > 0;
  while (c->out_off < c->out_len) {
    ssize_t n = send(c->fd, c->out + c->out_off, c->out_len - c->out_off, MSG_NOSIGNAL);
    if (n < 0) { if (errno != EAGAIN) c->out_off = c->out_len; break; }
    c->out_off += n;
  }
  int waits = c->out_off < c->out_len;
  if (!waits) c->out_len = c->out_off = 0;
  if (waits || waited) {
    struct epoll_event e = {.events = EPOLLIN | (waits ? EPOLLOUT : 0), .data.ptr = c};
    epoll_ctl(poller, EPOLL_CTL_MOD, c->fd, &e);
  }
}
static void schedule(conn *c) {
  if (c->slot >= 0) return;
  if (timed_count == timed_cap) timed = realloc(timed, (timed_cap = 2 * timed_cap + 64) * sizeof *timed);
  timed[c->slot = timed_count++] = c;
}
static void unschedule(conn *c) {
  if (c->slot < 0) return;
  timed[c->slot] = timed[--timed_count];
  timed[c->slot]->slot = c->slot;
  c->slot = -1;
}
static int usage(conn *c, char *text) {
  return sprintf(text, "{\"prompt_tokens\":%ld,\"completion_tokens\":%d,\"total_tokens\":%ld}", c->prompt_tokens, c->chunks, c->prompt_tokens + c->chunks);
}
static void chunk(conn *c) {
  char text[512];
  const char *reason = ++c->sent == c->chunks ? "\"length\"" : "null";
  const char *shape = c->chat ? "data: {\"id\":\"chatcmpl-0123456789abcdef\",\"object\":\"chat.completion.chunk\",\"created\":1700000000,\"model\":\"tiny\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\" word\"},\"logprobs\":null,\"finish_reason\":%s}]}\n\n"
                              : "data: {\"id\":\"cmpl-0123456789abcdef01234567\",\"object\":\"text_completion\",\"created\":1700000000,\"model\":\"tiny\",\"choices\":[{\"index\":0,\"text\":\" word\",\"logprobs\":null,\"finish_reason\":%s}]}\n\n";
  event(c, text, sprintf(text, shape, reason));
}
static void pump(conn *c, int64_t t) {  // all chunks that are due
  while (c->sent < c->chunks && c->due_ns <= t) {
    chunk(c);
    c->due_ns += gap_ns;
    if (!coalesce) flush(c);
  }
  if (c->sent < c->chunks) { schedule(c); return; }
  char text[512], counts[128];
  if (c->wants_usage) {
    usage(c, counts);
    event(c, text, sprintf(text, "data: {\"id\":\"0\",\"object\":\"%s\",\"created\":1700000000,\"model\":\"tiny\",\"choices\":[],\"usage\":%s}\n\n", c->chat ? "chat.completion.chunk" : "text_completion", counts));
  }
  event(c, "data: [DONE]\n\n", 14);
  put(c, "0\r\n\r\n", 5);
  flush(c);
  unschedule(c);
  c->busy = 0;
}
static void json(conn *c, int status, const char *body) {
  char head[128];
  put(c, head, sprintf(head, "HTTP/1.1 %d OK\r\ncontent-type: application/json\r\ncontent-length: %zu\r\n\r\n", status, strlen(body)));
  put(c, body, strlen(body));
  flush(c);
}
static const char *after(const char *body, const char *name) {  // the value of a JSON field, found by its name alone
  const char *p = strstr(body, name);
  if (!p) return NULL;
  for (p += strlen(name); *p == ' ' || *p == ':';) p++;
  return p;
}
static long count_tokens(const char *body) {
  const char *p = after(body, "\"prompt\"");
  long count = 1;
  if (p && *p == '[') { for (; *p && *p != ']'; p++) count += *p == ','; return count; }
  for (p = p ? p : body; *p; p++) count += *p == ' ';
  return count;
}
static void answer(conn *c, const char *path, const char *body) {
  c->chat = !strncmp(path, "/v1/chat/", 9);
  if (!c->chat && strncmp(path, "/v1/completions", 15)) {
    char text[64];
    sprintf(text, "{\"requests\":%ld}", requests);
    json(c, strncmp(path, "/metrics", 8) ? 200 : 404, !strncmp(path, "/v1/models", 10) ? "{\"object\":\"list\",\"data\":[{\"id\":\"tiny\",\"object\":\"model\",\"created\":1700000000,\"owned_by\":\"bench\",\"root\":\"tiny\",\"max_model_len\":131072}]}" : text);
    return;
  }
  const char *limit = after(body, "\"max_completion_tokens\""), *stream = after(body, "\"stream\""), *wanted = after(body, "\"include_usage\"");
  if (!limit) limit = after(body, "\"max_tokens\"");
  c->chunks = limit ? atoi(limit) : 16;
  if (c->chunks < 1) c->chunks = 16;
  c->wants_usage = wanted && *wanted == 't';
  c->prompt_tokens = count_tokens(body);
  c->sent = 0;
  requests++;
  if (record) fprintf(record, "%lld,%lld,%ld,%d\n", (long long)c->first_ns, (long long)c->read_ns, c->prompt_tokens, c->chunks);
  if (!stream || *stream != 't') {
    char text[512], counts[128];
    usage(c, counts);
    sprintf(text, "{\"id\":\"0\",\"object\":\"x\",\"created\":1700000000,\"model\":\"tiny\",\"choices\":[{\"index\":0,%s,\"finish_reason\":\"length\"}],\"usage\":%s}", c->chat ? "\"message\":{\"role\":\"assistant\",\"content\":\" word\"}" : "\"text\":\" word\"", counts);
    json(c, 200, text);
    return;
  }
  static const char head[] = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n";
  put(c, head, sizeof head - 1);
  c->busy = 1;
  c->due_ns = now() + ttft_ns;
  if (!coalesce || ttft_ns) flush(c);
  pump(c, now());
}
static void handle(conn *c) {
  while (!c->busy && c->in_len) {
    c->in[c->in_len] = 0;
    char *end = strstr(c->in, "\r\n\r\n");
    if (!end) return;
    size_t head = end - c->in + 4, length = 0;
    *end = 0;
    char *field = strcasestr(c->in, "\r\ncontent-length:");
    if (field) length = strtoul(field + 17, NULL, 10);
    *end = '\r';
    if (c->in_len < head + length) return;
    char *body = c->in + head, saved = body[length], *path = strchr(c->in, ' ') + 1;
    c->read_ns = now();
    body[length] = 0;
    answer(c, path, body);
    body[length] = saved;
    memmove(c->in, body + length, c->in_len - head - length);
    c->in_len -= head + length;
    c->first_ns = now();
  }
}
static int is_gone(conn *c) {  // reads what has come
  for (;;) {
    if (c->in_cap - c->in_len < 8192) c->in = realloc(c->in, (c->in_cap = 2 * c->in_cap + 16384) + 1);
    ssize_t n = recv(c->fd, c->in + c->in_len, c->in_cap - c->in_len, 0);
    if (n == 0) return 1;
    if (n < 0) return errno != EAGAIN;
    if (!c->in_len) c->first_ns = now();
    c->in_len += n;
  }
}
static void take_all(int listener) {
  for (int fd, one = 1; (fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK)) >= 0;) {
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    conn *c = calloc(1, sizeof *c);
    c->fd = fd;
    c->slot = -1;
    struct epoll_event e = {.events = EPOLLIN, .data.ptr = c};
    epoll_ctl(poller, EPOLL_CTL_ADD, fd, &e);
  }
}
int main(int count, char **words) {
  double stall_at_s = 0, stall_s = 0;
  for (int i = 2; i < count; i++) {
    if (!strcmp(words[i], "--coalesce")) coalesce = 1;
    else if (!strcmp(words[i], "--gap-us")) gap_ns = 1000LL * atol(words[++i]);
    else if (!strcmp(words[i], "--ttft-us")) ttft_ns = 1000LL * atol(words[++i]);
    else if (!strcmp(words[i], "--stall-at-s")) stall_at_s = atof(words[++i]);
    else if (!strcmp(words[i], "--stall-s")) stall_s = atof(words[++i]);
    else if (!strcmp(words[i], "--log")) record = fopen(words[++i], "w");
  }
  signal(SIGTERM, on_signal);
  signal(SIGINT, on_signal);
  int listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0), one = 1;
  setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
  struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons(atoi(words[1])), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  if (bind(listener, (void *)&at, sizeof at) || listen(listener, 4096)) { perror("bind"); return 1; }
  poller = epoll_create1(0);
  struct epoll_event own = {.events = EPOLLIN}, events[512];
  epoll_ctl(poller, EPOLL_CTL_ADD, listener, &own);
  int64_t stall_ns = 0;
  while (!stopped) {
    struct timespec wait = {1, 0};
    if (timed_count) {
      int64_t due = INT64_MAX, t = now();
      for (int i = 0; i < timed_count; i++) if (timed[i]->due_ns < due) due = timed[i]->due_ns;
      due = due > t ? due - t : 0;
      if (due < 1000000000) wait = (struct timespec){0, due};
    }
    int n = epoll_pwait2(poller, events, 512, &wait, NULL);
    if (stall_s && requests && !stall_ns) stall_ns = now() + stall_at_s * 1e9;
    if (stall_ns && now() >= stall_ns) { usleep(stall_s * 1e6); stall_s = 0; stall_ns = 0; }
    for (int i = 0; i < n; i++) {
      conn *c = events[i].data.ptr;
      if (!c) { take_all(listener); continue; }
      if (is_gone(c) || events[i].events & (EPOLLERR | EPOLLHUP)) {
        unschedule(c);
        close(c->fd);
        free(c->in); free(c->out); free(c);
        continue;
      }
      handle(c);
      if (events[i].events & EPOLLOUT) flush(c);
    }
    int64_t t = now();
    for (int i = timed_count - 1; i >= 0; i--) if (i < timed_count && timed[i]->due_ns <= t) { conn *c = timed[i]; pump(c, t); if (coalesce) flush(c); if (!c->busy && c->in_len) handle(c); }
  }
  if (record) fclose(record);
  return 0;
}
