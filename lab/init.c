/* The first process of a lab machine: brings the machine up, runs one program, reports how it ended, powers off.
 *
 * What to do comes in the file /lab/plan, as pairs of NUL-terminated strings (key, value), in the order of execution:
 *   options VALUE   options of the next module
 *   module PATH     load this module
 *   address A       give the first Ethernet card this IPv4 address, /24
 *   gateway A       and send everything else there
 *   env NAME=VALUE  environment of the program
 *   arg VALUE       the program's path, then its arguments
 *
 * What happens goes to the third serial port, one line each:
 *   ready           the machine is up, the program is about to start
 *   exit N          the program returned N
 *   signal N        the program was killed by signal N
 *   error TEXT      the machine could not be brought up
 *
 * The first serial port is the kernel's console, the second carries what the program writes.
 * Linked statically, so that the machine needs no libraries for it.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <net/if.h>
#include <net/route.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/reboot.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <termios.h>
#include <unistd.h>

#define PLAN "/lab/plan"
#define OUTPUT "/dev/ttyS1"
#define REPORT "/dev/ttyS2"
#define ARGS_MAX 1024

static int report = STDERR_FILENO; /* the console, until the serial port is open */

static void say(const char *format, ...)
{
	char line[1024];
	va_list args;

	va_start(args, format);
	int length = vsnprintf(line, sizeof(line) - 1, format, args);
	va_end(args);
	if (length > (int)sizeof(line) - 2)
		length = sizeof(line) - 2;
	line[length++] = '\n';
	for (int sent = 0; sent < length;) {
		ssize_t n = write(report, line + sent, length - sent);
		if (n < 0 && errno != EINTR)
			return;
		if (n > 0)
			sent += n;
	}
}

static void power_off(void)
{
	sync();
	tcdrain(report);
	reboot(RB_POWER_OFF);
	/* Without a power switch the kernel comes back here: stop as a reboot, which ends QEMU too. */
	reboot(RB_AUTOBOOT);
	for (;;)
		pause();
}

#define FAIL(...) do { say("error " __VA_ARGS__); power_off(); } while (0)

static void mount_all(void)
{
	static const struct {
		const char *type, *where, *options;
		int required;
	} mounts[] = {
		{ "proc", "/proc", "", 1 },
		{ "sysfs", "/sys", "", 1 },
		{ "devtmpfs", "/dev", "", 1 },
		{ "devpts", "/dev/pts", "", 0 },
		{ "tmpfs", "/dev/shm", "mode=1777", 1 },
		{ "tmpfs", "/tmp", "mode=1777", 1 },
		{ "tmpfs", "/run", "mode=755", 1 },
		/* A kernel may lack these; the program that needs one will say so. */
		{ "cgroup2", "/sys/fs/cgroup", "", 0 },
		{ "bpf", "/sys/fs/bpf", "", 0 },
		{ "debugfs", "/sys/kernel/debug", "", 0 },
		{ "tracefs", "/sys/kernel/tracing", "", 0 },
	};
	for (size_t i = 0; i < sizeof(mounts) / sizeof(*mounts); i++) {
		mkdir(mounts[i].where, 0755);
		if (mount(mounts[i].type, mounts[i].where, mounts[i].type, 0, mounts[i].options) && mounts[i].required)
			FAIL("cannot mount %s: %s", mounts[i].where, strerror(errno));
	}
	/* The links that udev would make, and that shells and libraries expect. */
	symlink("/proc/self/fd", "/dev/fd");
	symlink("/proc/self/fd/0", "/dev/stdin");
	symlink("/proc/self/fd/1", "/dev/stdout");
	symlink("/proc/self/fd/2", "/dev/stderr");
}

/* Opens a serial port that passes bytes as they are (no "\n" to "\r\n"). */
static int open_port(const char *path)
{
	struct termios settings;
	int fd = open(path, O_RDWR | O_NOCTTY | O_CLOEXEC);

	if (fd < 0 || tcgetattr(fd, &settings))
		FAIL("cannot open %s: %s", path, strerror(errno));
	cfmakeraw(&settings);
	tcsetattr(fd, TCSANOW, &settings);
	return fd;
}

static void load_module(const char *path, const char *options)
{
	int fd = open(path, O_RDONLY | O_CLOEXEC);

	if (fd < 0)
		FAIL("cannot open module %s: %s", path, strerror(errno));
	if (syscall(SYS_finit_module, fd, options, 0) && errno != EEXIST)
		FAIL("cannot load module %s: %s", path, strerror(errno));
	close(fd);
}

static struct sockaddr address_of(const char *text)
{
	struct sockaddr_in in = { .sin_family = AF_INET };
	struct sockaddr any;

	if (text && inet_pton(AF_INET, text, &in.sin_addr) != 1)
		FAIL("not an IPv4 address: %s", text);
	memcpy(&any, &in, sizeof(any));
	return any;
}

static void interface_up(int sock, const char *name)
{
	struct ifreq request = { 0 };

	strncpy(request.ifr_name, name, IFNAMSIZ - 1);
	if (ioctl(sock, SIOCGIFFLAGS, &request))
		FAIL("no network interface %s: %s", name, strerror(errno));
	request.ifr_flags |= IFF_UP;
	if (ioctl(sock, SIOCSIFFLAGS, &request))
		FAIL("cannot bring up %s: %s", name, strerror(errno));
}

static void network_up(const char *address, const char *gateway)
{
	int sock = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);

	interface_up(sock, "lo");
	if (address) {
		struct ifreq request = { .ifr_name = "eth0" };
		request.ifr_addr = address_of(address);
		if (ioctl(sock, SIOCSIFADDR, &request))
			FAIL("cannot give eth0 the address %s: %s", address, strerror(errno));
		request.ifr_netmask = address_of("255.255.255.0");
		if (ioctl(sock, SIOCSIFNETMASK, &request))
			FAIL("cannot set the netmask of eth0: %s", strerror(errno));
		interface_up(sock, "eth0");
	}
	if (gateway) {
		struct rtentry route = { .rt_flags = RTF_UP | RTF_GATEWAY };
		route.rt_dst = address_of(NULL);
		route.rt_genmask = address_of(NULL);
		route.rt_gateway = address_of(gateway);
		if (ioctl(sock, SIOCADDRT, &route))
			FAIL("cannot route through %s: %s", gateway, strerror(errno));
	}
	close(sock);
}

static char *read_plan(size_t *length)
{
	struct stat info;
	int fd = open(PLAN, O_RDONLY | O_CLOEXEC);

	if (fd < 0 || fstat(fd, &info))
		FAIL("cannot open " PLAN ": %s", strerror(errno));
	char *plan = malloc(info.st_size + 1);
	if (!plan || read(fd, plan, info.st_size) != info.st_size)
		FAIL("cannot read " PLAN);
	plan[info.st_size] = 0;
	close(fd);
	*length = info.st_size;
	return plan;
}

/* Starts the program as the leader of its own session. */
static pid_t start(char **argv, int output)
{
	int failure[2], error = 0;

	if (pipe2(failure, O_CLOEXEC))
		FAIL("pipe: %s", strerror(errno));
	say("ready");
	pid_t pid = fork();
	if (pid == 0) {
		setsid();
		dup2(open("/dev/null", O_RDONLY | O_CLOEXEC), STDIN_FILENO);
		dup2(output, STDOUT_FILENO);
		dup2(output, STDERR_FILENO);
		execv(argv[0], argv);
		write(failure[1], &errno, sizeof(errno));
		_exit(127);
	}
	close(failure[1]);
	if (pid < 0)
		FAIL("fork: %s", strerror(errno));
	/* The pipe closes without a word when the program has started. */
	if (read(failure[0], &error, sizeof(error)) == sizeof(error))
		FAIL("cannot run %s: %s", argv[0], strerror(error));
	close(failure[0]);
	return pid;
}

int main(void)
{
	static char *argv[ARGS_MAX + 1];
	const char *options = "", *address = NULL, *gateway = NULL;
	size_t length, args = 0;
	int status;

	mount_all();
	report = open_port(REPORT);
	int output = open_port(OUTPUT);
	clearenv();
	setenv("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", 1);
	setenv("HOME", "/tmp", 1);

	char *plan = read_plan(&length);
	for (char *key = plan; key < plan + length;) {
		char *value = key + strlen(key) + 1;
		if (!strcmp(key, "options")) {
			options = value;
		} else if (!strcmp(key, "module")) {
			load_module(value, options);
			options = "";
		} else if (!strcmp(key, "address")) {
			address = value;
		} else if (!strcmp(key, "gateway")) {
			gateway = value;
		} else if (!strcmp(key, "env")) {
			putenv(value);
		} else if (!strcmp(key, "arg")) {
			if (args == ARGS_MAX)
				FAIL("more than %d arguments", ARGS_MAX);
			argv[args++] = value;
		} else {
			FAIL("unknown word in the plan: %s", key);
		}
		key = value + strlen(value) + 1;
	}
	if (!args)
		FAIL("no program in the plan");
	network_up(address, gateway);

	pid_t program = start(argv, output);
	/* As the first process this one also inherits, and so reaps, orphans of the program. */
	for (;;) {
		pid_t pid = wait(&status);
		if (pid == program || (pid < 0 && errno != EINTR))
			break;
	}
	kill(-1, SIGKILL);
	/* What the program wrote has left the machine before anyone hears that it ended. */
	tcdrain(output);
	if (WIFSIGNALED(status))
		say("signal %d", WTERMSIG(status));
	else
		say("exit %d", WEXITSTATUS(status));
	power_off();
}
