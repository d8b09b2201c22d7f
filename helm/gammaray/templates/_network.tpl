{{/* Peers: Ray pods of the release, or those of one component: (dict "root" $ "component" name). */}}
{{- define "gammaray.from" -}}
- podSelector:
    matchLabels:
      {{- if .component }}
      {{- include "gammaray.selector" . | nindent 6 }}
      {{- else }}
      {{- include "gammaray.raySelector" .root | nindent 6 }}
      {{- end }}
{{- end -}}

{{/* Ports of Ray's processes on every node: raylet, object manager, agents, core workers. */}}
{{- define "gammaray.rayInternals" -}}
- from: {{- include "gammaray.from" (dict "root" .) | nindent 4 }}
  ports:
    - {port: 6380, endPort: 6383}
    - {port: 52365}
    - {port: 10002, endPort: 19999}
{{- end -}}

{{/* Allows Prometheus to scrape gammaray's and Ray's metrics. */}}
{{- define "gammaray.scraping" -}}
{{- with .Values.networkPolicy.monitoring }}
- from: {{- toYaml . | nindent 4 }}
  ports:
    - {port: 8080}
    - {port: {{ (include "gammaray.generated" $ | fromYaml).ports.metrics }}}
{{- end }}
{{- end -}}

{{/* Metadata and beginning of the spec of a component's policy: (dict "root" $ "component" name), optional "closed": it opens no connections. */}}
{{- define "gammaray.policy" -}}
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata:
  name: {{ printf "%s-%s" (include "gammaray.fullname" .root) .component | quote }}
  labels: {{- include "gammaray.labels" .root | nindent 4 }}
spec:
  podSelector:
    matchLabels: {{- include "gammaray.selector" . | nindent 6 }}
  policyTypes: [Ingress{{ if .closed }}, Egress{{ end }}]
{{- end -}}

{{/* Egress rules to destinations outside the release: DNS and the rules in the values. */}}
{{- define "gammaray.outside" -}}
{{- with .Values.networkPolicy.egress.dns }}
- to: {{- toYaml . | nindent 4 }}
  ports:
    - {port: 53, protocol: UDP}
    - {port: 53, protocol: TCP}
{{- end }}
{{- with .Values.networkPolicy.egress.rules }}
{{ toYaml . }}
{{- end }}
{{- end -}}
