#!/usr/bin/perl
# A model in Perl, without an SDK: answers each text in capitals. The protocol is docs/process-protocol.md.
use strict;
use warnings;
use Encode qw(decode);
use JSON::PP;

my $json = JSON::PP->new->utf8->canonical->allow_nonref;
open(my $socket, '+<&=', $ENV{VRAMQ_FD}) or die "VRAMQ_FD: $!";
binmode($socket);

sub exactly {
    my ($length, $bytes) = (shift, '');
    while (length($bytes) < $length) {
        sysread($socket, $bytes, $length - length($bytes), length($bytes)) or exit 0;    # The worker is gone.
    }
    return $bytes;
}

sub receive {
    my $header = $json->decode(exactly(unpack('V', exactly(4))));
    return ($header, map { exactly($_) } @{$header->{blobs} || []});
}

sub payload {
    my ($item, $blob) = @_;
    return $blob if !defined $item->{file};    # One that is too large for the frame comes by a file.
    open(my $file, '<:raw', "$ENV{VRAMQ_SCRATCH}/$item->{file}") or die "$item->{file}: $!";
    local $/;
    return <$file>;
}

sub send_frame {
    my ($header, @blobs) = @_;
    $header->{blobs} = [map { length } @blobs] if @blobs;
    my $text = $json->encode($header);
    my $bytes = join('', pack('V', length($text)), $text, @blobs);
    while (length($bytes)) {
        my $sent = syswrite($socket, $bytes) or exit 0;
        substr($bytes, 0, $sent) = '';
    }
}

receive();    # hello
send_frame({type => 'ready', version => 1, accepts => ['text']});
while (my ($header, @blobs) = receive()) {
    exit 0 if $header->{type} eq 'shutdown';
    send_frame({type => 'pong', number => $header->{number}}) if $header->{type} eq 'ping';
    next if $header->{type} ne 'run';
    for my $item (0 .. $#blobs) {
        my $text = decode('UTF-8', payload($header->{items}[$item], $blobs[$item]));
        my $output = $json->encode(uc($text));
        send_frame({type => 'output', pass => $header->{pass}, item => $item, kind => 'json'}, $output);
    }
    send_frame({type => 'done', pass => $header->{pass}});
}
