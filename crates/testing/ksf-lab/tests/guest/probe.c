/* Prints what a machine of the laboratory gives to its program, answers one connection on port 7000 with what it gets, in
 * capitals, and returns 7.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <net/if.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/sysinfo.h>
#include <unistd.h>

#define AF_KCM 41

static void print_file(const char *label, const char *path)
{
	char line[256];
	FILE *file = fopen(path, "r");

	printf("%s: %s", label, file && fgets(line, sizeof(line), file) ? line : strerror(errno));
}

static void check(const char *label, int fd)
{
	printf("%s: %s\n", label, fd >= 0 ? "ok" : strerror(errno));
}

static void print_command_line(const char *word)
{
	char line[4096] = "";
	FILE *file = fopen("/proc/cmdline", "r");

	if (file && fgets(line, sizeof(line), file) && strstr(line, word))
		printf("command line has %s\n", word);
}

static void print_interfaces(void)
{
	struct dirent **names;
	struct ifreq lo = { .ifr_name = "lo" };
	int count = scandir("/sys/class/net", &names, NULL, alphasort);

	for (int i = 0; i < count; i++)
		if (names[i]->d_name[0] != '.')
			printf(i + 1 < count ? "%s " : "%s", names[i]->d_name);
	ioctl(socket(AF_INET, SOCK_DGRAM, 0), SIOCGIFFLAGS, &lo);
	printf(": %s\n", lo.ifr_flags & IFF_UP ? "up" : "down");
}

static int over_loopback(void)
{
	struct sockaddr_in address = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
	socklen_t length = sizeof(address);
	int listener = socket(AF_INET, SOCK_STREAM, 0), client = socket(AF_INET, SOCK_STREAM, 0);

	if (bind(listener, (void *)&address, length) || listen(listener, 1) ||
	    getsockname(listener, (void *)&address, &length))
		return -1;
	return connect(client, (void *)&address, length);
}

static int shout(void)
{
	struct sockaddr_in address = { .sin_family = AF_INET, .sin_port = htons(7000) };
	int listener = socket(AF_INET, SOCK_STREAM, 0);
	char buffer[256];
	ssize_t length;

	if (bind(listener, (void *)&address, sizeof(address)) || listen(listener, 1))
		return -1;
	puts("listening");
	fflush(stdout);
	int peer = accept(listener, NULL, NULL);
	while ((length = read(peer, buffer, sizeof(buffer))) > 0) {
		for (ssize_t i = 0; i < length; i++)
			buffer[i] = toupper((unsigned char)buffer[i]);
		if (write(peer, buffer, length) != length)
			return -1;
	}
	return close(peer);
}

int main(int argc, char **argv)
{
	for (int i = 1; i < argc; i++)
		printf("argument: %s\n", argv[i]);
	printf("KSF: %s\n", getenv("KSF"));
	print_file("file", "/deep/in/the/machine");
	printf("processors: %ld\n", sysconf(_SC_NPROCESSORS_ONLN));
	print_command_line("ksf.example=1");
	struct sysinfo info;
	sysinfo(&info);
	unsigned long mib = info.totalram / 1024 / 1024 * info.mem_unit;
	if (mib >= 150 && mib <= 256)
		printf("memory is between 150 and 256 MiB\n");
	else
		printf("memory is %lu MiB\n", mib);
	check("AF_KCM socket", socket(AF_KCM, SOCK_SEQPACKET, 0));
	print_interfaces();
	check("loopback", over_loopback());
	check("cgroup.controllers", access("/sys/fs/cgroup/cgroup.controllers", R_OK));
	if (shout())
		perror("shout");
	fflush(stdout);
	fprintf(stderr, "to standard error\n");
	return 7;
}
