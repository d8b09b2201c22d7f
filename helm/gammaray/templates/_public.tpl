{{/* Service of one API: (dict "root" $ "kind" "http" or "grpc"). */}}
{{- define "gammaray.publicService" -}}
{{- $values := .root.Values.service -}}
{{- $serve := include "gammaray.serve" .root | fromYaml -}}
{{- $port := dict "name" .kind "port" (get $values (printf "%sPort" .kind)) "targetPort" (get $serve (printf "%s_options" .kind)).port -}}
{{- /* Tells Gateways to use HTTP/2 without TLS for gRPC. */ -}}
{{- $_ := set $port "appProtocol" (ternary "kubernetes.io/h2c" "http" (eq .kind "grpc")) -}}
{{- $patch := deepCopy $values.patch -}}
{{- with dig "spec" "ports" list $patch -}}
{{- $ports := list -}}
{{- range . -}}
{{- if eq .name $.kind -}}
{{- $ports = append $ports . -}}
{{- end -}}
{{- end -}}
{{- $_ := set $patch.spec "ports" $ports -}}
{{- end -}}
{{- $metadata := dict "name" (printf "%s-%s" (include "gammaray.fullname" .root) .kind) "labels" (include "gammaray.labels" .root | fromYaml) -}}
{{- with $values.annotations -}}
{{- $_ := set $metadata "annotations" (deepCopy .) -}}
{{- end -}}
{{- $selector := include "gammaray.selector" (dict "root" .root "component" "orchestrator") | fromYaml -}}
{{- $spec := dict "type" $values.type "selector" $selector "ports" (list $port) -}}
apiVersion: v1
kind: Service
{{ (include "gammaray.patched" (dict "old" (dict "metadata" $metadata "spec" $spec) "new" $patch "field" "") | fromJson).value | toYaml }}
{{- end -}}

{{/* Hosts of one API in the Ingresses, as a JSON list: (dict "root" $ "kind" "http" or "grpc"). */}}
{{- define "gammaray.ingressHosts" -}}
{{- $values := .root.Values.ingress -}}
{{- concat (list (get $values (printf "%sHost" .kind))) (get $values (printf "%sMoreHosts" .kind)) | uniq | toJson -}}
{{- end -}}

{{/* Ingress of one API: (dict "root" $ "kind" "http" or "grpc"). */}}
{{- define "gammaray.ingress" -}}
{{- $values := .root.Values.ingress -}}
{{- $name := printf "%s-%s" (include "gammaray.fullname" .root) .kind -}}
{{- $hosts := include "gammaray.ingressHosts" . | fromJsonArray -}}
apiVersion: networking.k8s.io/v1
kind: Ingress
metadata:
  name: {{ $name | quote }}
  labels: {{- include "gammaray.labels" .root | nindent 4 }}
  {{- with get $values (printf "%sAnnotations" .kind) }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  {{- with $values.className }}
  ingressClassName: {{ . | quote }}
  {{- end }}
  {{- with include "gammaray.tlsSecret" .root }}
  tls:
    - hosts: {{- toYaml $hosts | nindent 8 }}
      secretName: {{ . | quote }}
  {{- end }}
  rules:
    {{- range $host := $hosts }}
    - host: {{ $host | quote }}
      http:
        paths:
          {{- range ternary (list "/") $values.httpPaths (eq $.kind "grpc") }}
          - path: {{ . | quote }}
            pathType: Prefix
            backend:
              service:
                name: {{ $name | quote }}
                port: {name: {{ $.kind }}}
          {{- end }}
    {{- end }}
{{- end -}}
